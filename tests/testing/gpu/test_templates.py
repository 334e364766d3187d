"""Inductor's templates in a GPU's program: FlexAttention, and products of max-autotune, within a bound."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
SIZE = 128


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def heads(count, other=None, dtype=torch.float32):
    """A query, key and value that require grad."""
    return [
        normal(1, each, SIZE, 32, dtype=dtype, seed=seed).requires_grad_()
        for seed, each in enumerate((count, other or count, other or count))
    ]


def windowed(b, h, i, j):
    return (i >= j) & (i - j <= 40)


def soft_capped(query, key, value):
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: 5 * torch.tanh(score / 5))


def with_slopes(query, key, value, slopes):
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score + slopes[h] * (j - i))


def fused(query, key, value):
    out, sums = flex_attention(query, key, value, return_lse=True)
    return (out * 2).relu().transpose(1, 2), sums


def sloped(query, key, value):
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score - 0.1 * j, return_lse=True)


def masked(*args, mask):
    return flex_attention(*args, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("name", ["soft cap", "window, groups", "slopes", "fused, sums"])
def test_flex_attention_forward_and_backward(name):
    mask = create_block_mask(windowed, None, None, SIZE, SIZE, device="cpu")
    fn, args = {
        "soft cap": (soft_capped, heads(2)),
        "window, groups": (lambda *args: masked(*args, mask=mask), heads(4, 2, torch.bfloat16)),
        "slopes": (with_slopes, [*heads(2), torch.tensor([0.1, 0.2], requires_grad=True)]),
        "fused, sums": (fused, heads(1)),
    }[name]
    run = run_gpu_program(fn, *args)
    assert not run.differences, str(run.differences)
    assert [any(launch.name.startswith("triton_tem") for launch in graph.launches) for graph in run.graphs] == [
        True
    ] * 2
    assert run.gradients.keys() == {f"args[{at}]" for at in range(len(args))}


def test_attention_is_that_of_the_formula():
    """In float64, without FlexAttention."""
    args = heads(2)
    query, key, value = (each.detach().double() for each in args)
    scores = 5 * torch.tanh(query @ key.mT / 32**0.5 / 5)
    run = run_gpu_program(soft_capped, *args)
    # a sum of 128 terms in float32, of a softmax with roundings of scores below 5: 2^-24 * (128 + 5 * 32) < 2e-5
    torch.testing.assert_close(run.outputs[0].double(), scores.softmax(-1) @ value, rtol=2e-5, atol=2e-5)


def test_one_query_is_decoded_in_parts():
    query, key, value = normal(1, 2, 1, 32), normal(1, 2, SIZE, 32, seed=1), normal(1, 2, SIZE, 32, seed=2)
    run = run_gpu_program(soft_capped, query, key, value)
    assert not run.differences, str(run.differences)


def product(x, y):
    return torch.nn.functional.gelu(x @ y)


def biased(x, y):
    return torch.addmm(y[0], x, y).relu() + 1


def grouped(x, y, ends):
    return torch._grouped_mm(x, y, offs=ends)


def scaled(x, y):
    return torch._scaled_mm(x, y, x.new_ones((), dtype=torch.float32) * 0.3, y.new_ones((), dtype=torch.float32) * 0.7,
                            out_dtype=torch.bfloat16).relu()  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "dtype"), [(product, torch.bfloat16), (product, torch.float32), (biased, torch.bfloat16)]
)
def test_products_by_templates_have_the_values_of_their_graphs(fn, dtype):
    args = [normal(40, 64, dtype=dtype).requires_grad_(), normal(64, 96, dtype=dtype, seed=1).requires_grad_()]
    run = run_gpu_program(fn, *args, templates=(0,))
    assert not run.differences, str(run.differences)
    assert not run.products, "all three are multiplied by templates"


@pytest.mark.parametrize("derived", [False, True])
def test_grouped_products_by_templates(derived, monkeypatch):
    from torch._inductor.kernel import mm_grouped
    from torch.utils import _triton

    monkeypatch.setattr(mm_grouped, "has_triton", _triton.has_triton)  # as if a test before had imported it,
    mm_grouped.has_triton()  # and had kept the answer of this machine
    x, y = (normal(*shape, dtype=torch.bfloat16).requires_grad_(derived) for shape in ((64, 32), (3, 32, 48)))
    run = run_gpu_program(grouped, x, y, torch.tensor([16, 40, 64], dtype=torch.int32), templates=(0,))
    assert not run.differences, str(run.differences)
    assert not run.products


def test_float8_products_by_templates():
    x, y = normal(32, 64).to(torch.float8_e4m3fn), normal(48, 64, seed=1).to(torch.float8_e4m3fn).t()
    run = run_gpu_program(scaled, x, y, templates=(0, 1))
    assert not run.differences, str(run.differences)
    assert not run.products


def test_every_template_that_inductor_would_time_runs():
    run = run_gpu_program(torch.mm, normal(32, 32), normal(32, 32, seed=1), templates="all")
    assert not run.differences, str(run.differences)


def planted(monkeypatch, old, new):
    """Change generated code."""
    from fp8compile.testing.gpu.program import generate

    plain = generate.schedule

    def changed(*args):
        found = plain(*args)
        assert old in found.source
        return replace(found, source=found.source.replace(old, new))

    monkeypatch.setattr(generate, "schedule", changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("acc = acc * alpha[:, None]", "acc = acc * 1.001"),  # values that came before a new maximum
        ("lse = m_i + tl.math.log2(l_i)", "lse = m_i + tl.math.log2(l_i * 1.0001)"),
        ("offs_n = kv_start + tl.arange", "offs_n = kv_start + 1 + tl.arange"),  # keys that a score_mod sees
    ],
)
def test_a_fault_in_attention_is_found(monkeypatch, old, new):
    planted(monkeypatch, old, new)
    run = run_gpu_program(sloped, *(each.detach() for each in heads(1)))
    assert any("off by more than" in each.where for each in run.differences), str(run.differences)
    assert run.differences[0].where.startswith("forward, triton_tem")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.cdiv(K, BLOCK_K)", "(K // BLOCK_K)"),  # the last terms, where K is no multiple
        ("acc += tl.dot", "acc = acc.to(tl.float16).to(tl.float32); acc += tl.dot"),
    ],
)
def test_a_fault_in_a_product_is_found(monkeypatch, old, new):
    planted(monkeypatch, old, new)
    run = run_gpu_program(torch.mm, normal(32, 72), normal(72, 48, seed=1), templates=(0,))
    assert "triton_tem" in run.differences[0].where, str(run.differences)
    assert "off by more than" in run.differences[0].where


def test_a_template_that_triton_refuses_is_named_with_its_line():
    """docs/upstream.md: the kernel is made for the dtype that was viewed, and not for that of the view."""

    def viewed(x, y):
        return x.view(torch.bfloat16) @ y

    x, y = normal(32, 32, dtype=torch.bfloat16).view(torch.int16), normal(32, 32, dtype=torch.bfloat16, seed=1)
    with pytest.raises(
        RuntimeError, match=r"triton_tem__0: at .*\.py:\d+: Triton raises an error: Unsupported lhs dtype"
    ):
        run_gpu_program(viewed, x, y, templates=(0,))
    assert not run_gpu_program(viewed, x, y).differences


def test_templates_are_numbers_or_all():
    with pytest.raises(ValueError, match="`templates` is 'best'; it must be 'all' or a sequence of template indices"):
        run_gpu_program(torch.mm, normal(32, 32), normal(32, 32), templates="best")
