"""The programs of GPUs that people own, executed to the bit; the cast of compute capability 8.9, and its mend."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from fp8compile import formats
from fp8compile.recipes import READY
from fp8compile.target import Target, pretend_target
from fp8compile.testing import run_gpu_program
from fp8compile.testing.explain.roofline import PEAKS
from fp8compile.testing.gpu.gpus import GPUS, pretend_gpu, pretend_triton
from fp8compile.testing.gpu.program.arithmetic import through_float16

pytest.importorskip("triton", reason="generated GPU code needs Triton")
SLOW = [pytest.mark.slow]
ADA = Target("cuda", (8, 9))
BLOCKS = {
    "rtx4090": f8.recipes.rowwise(),
    "h100": f8.recipes.blockwise(),
    "b300": f8.recipes.mxfp8(),
    "rtx5090": f8.recipes.mxfp8(),
}


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def block(recipe):
    torch.manual_seed(0)
    model = f8.convert(FeedForward().bfloat16(), recipe)
    return model, torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)


def layer(recipe):
    torch.manual_seed(0)
    model = f8.convert(nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16(), recipe)
    return model, torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)


# MX codes of a layer are below
@pytest.mark.parametrize("arch", [pytest.param(each, marks=SLOW * (each in ("b300", "rtx5090"))) for each in BLOCKS])
def test_forward_and_backward_of_a_feed_forward_are_the_graphs_to_the_bit(arch):
    model, x = block(BLOCKS[arch])
    result = run_gpu_program(model, x, arch=arch)
    assert len([product for graph in result.graphs for product in graph.products]) == 9
    assert result.differences == ()


OWNED = ("rtx4090", "h100", "rtx5090")
REFUSED = {  # by the gates of its products, in words that name the GPUs which have them
    ("rtx4090", "blockwise"): "needs compute capability 9.0",
    ("rtx4090", "blockwise_bf16_wgrad"): "needs compute capability 9.0",
    ("rtx4090", "mxfp8"): "is MX, which needs compute capability 10.0",
    ("rtx4090", "nvfp4"): "is NVFP4, which needs compute capability 10.0",
    ("h100", "mxfp8"): "is MX, which needs compute capability 10.0",
    ("h100", "nvfp4"): "is NVFP4, which needs compute capability 10.0",
    ("rtx5090", "blockwise"): "needs power-of-two scales",
    ("rtx5090", "blockwise_bf16_wgrad"): "needs power-of-two scales",
}
# four bits take many times longer than eight; test_nvfp4_on_a_gpu.py has a B200's
CELLS = [
    pytest.param(arch, recipe, marks=SLOW * (recipe == "nvfp4" and (arch, recipe) not in REFUSED))
    for arch in OWNED
    for recipe in READY
]


@pytest.mark.parametrize(("arch", "recipe"), CELLS)
def test_a_layer_of_each_recipe_is_its_graphs_to_the_bit_or_is_refused(arch, recipe):
    model, x = layer(READY[recipe]())
    if (arch, recipe) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[arch, recipe]):
            run_gpu_program(model, x, arch=arch)
        return
    result = run_gpu_program(model, x, arch=arch)
    assert len(result.products) == 3
    assert result.differences == ()
    assert result.gradients.keys() == {"args[0]", "0.weight"}


EXPERTS = {
    "rtx4090": f8.recipes.rowwise(),
    "h100": f8.recipes.blockwise(),
    "b300": f8.recipes.mxfp8(),
    "rtx5090": f8.recipes.blockwise(),
}


# 8.9 has a cast and a product of its own
@pytest.mark.parametrize("arch", [pytest.param(each, marks=SLOW * (each != "rtx4090")) for each in EXPERTS])
def test_forward_and_backward_of_experts_are_the_graphs_to_the_bit(arch):
    torch.manual_seed(0)
    *arguments, ends = experts_arguments(40, 64, 32, 3)
    arguments = [torch.randn(each.shape).bfloat16().requires_grad_() for each in arguments]
    ends = torch.tensor([0, 19, 36], dtype=torch.int32)  # one has no tokens, and four rows no expert
    result = run_gpu_program(partial(feed_forward, recipe=EXPERTS[arch]), *arguments, ends, arch=arch)
    assert len([product for graph in result.graphs for product in graph.products]) == 6
    assert result.differences == ()


def test_each_gpu_has_properties_and_peaks_of_one_capability():
    assert GPUS.keys() == PEAKS.keys()
    assert all(GPUS[name].target.architecture == PEAKS[name].capability for name in GPUS)
    assert all(gpu.cc == (gpu.gcnArchName or 10 * gpu.major + gpu.minor) for gpu in GPUS.values())


def test_a_module_sees_the_pretended_gpu_whenever_it_has_imported_a_question():
    """Inductor's grouped products bind has_triton when they are imported, before a pretended GPU or under one."""
    from torch.utils import _triton

    bound_before = _triton.has_triton
    answer = bound_before()
    gpu = GPUS["h200"]
    with pretend_triton(gpu):
        bound_meanwhile = _triton.has_triton
        with pretend_gpu(gpu):
            assert bound_before()
            assert bound_meanwhile()
    assert bound_before() == bound_meanwhile() == answer
    with pretend_gpu(gpu):
        assert bound_meanwhile()


# ---------------------------------------------------------------------------------- 8.9 casts by float16


def values(fmt):
    any_bits = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    subnormal = torch.randn(1 << 16) * 2.0**fmt.min_exponent
    # each bfloat16 value, which is all that lies between two codes, and its neighbours in float32
    bfloat16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    near = torch.cat([bfloat16 + low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1.0625001, fmt.max, float("nan"), float("inf"), -float("inf")])
    return torch.cat((any_bits, near, subnormal, torch.randn(1 << 16) * fmt.max / 4, edges, -edges))


@pytest.mark.parametrize("fmt", [formats.E4M3, formats.E5M2], ids=lambda fmt: fmt.name)
def test_values_of_nearest_codes_are_cast_as_without(fmt):
    x = values(fmt)
    expected = fmt.encode(x)
    with pretend_target(ADA):
        assert torch.equal(fmt.encode(x), expected)
        assert torch.equal(fmt.encode_numbers(x)[~x.isnan()], expected[~x.isnan()])
        given = fmt._saturated(x).numpy()
    by_float16 = torch.from_numpy(through_float16(given)).to(fmt.dtype).view(torch.uint8)
    assert torch.equal(by_float16[~x.isnan()], expected[~x.isnan()])


def test_codes_of_8_9_would_differ_without_the_mend(monkeypatch):
    monkeypatch.setattr(formats, "CASTS_BY_FLOAT16", None)
    torch._dynamo.reset()
    model, x = layer(f8.recipes.rowwise())
    differences = run_gpu_program(model, x, arch="rtx4090").differences
    assert differences
    assert any("forward, product 0" in each.where and "left operand" in each.where for each in differences)
