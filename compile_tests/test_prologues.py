"""Kernels that compute their input: whatever code comes before an expert's cast, the executed program has its bits."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

import fp8compile as f8
from fp8compile.testing import gpu_kernels, run_gpu_program

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9, once a process
]
ROWS, WIDTH, OUT = 80, 64, 48
ENDS = torch.tensor([0, 33, 34, 60], dtype=torch.int32)  # an empty group, rows behind the last one


def multiplied(x, weight, recipe):
    return f8.grouped_linear(x, weight, ENDS, recipe=f8.recipes.by_name(recipe))


def product(x, weight, other, recipe):
    return multiplied(torch.sigmoid(x) * other, weight, recipe)


def scaled_rows(x, weight, other, recipe):
    return multiplied(x * other[:, :1] + other.detach()[0, 0], weight, recipe)


def gathered(x, weight, other, recipe):
    rows = torch.arange(ROWS - 1, -1, -1) // 2 - 5  # some count from the end
    return multiplied(x.detach()[rows] * other, weight, recipe)


def joined(x, weight, other, recipe):
    return multiplied(torch.cat((x[:, ::2].exp(), other[:, 1::2] * 3), dim=1), weight, recipe)


def numbered(x, weight, other, recipe):
    numbers = torch.arange(WIDTH) * torch.arange(ROWS)[:, None] * 0.125
    return multiplied((x + numbers).to(x.dtype), weight, recipe)


def transposed(x, weight, other, recipe):
    return multiplied((x.reshape(WIDTH, ROWS) * 2).t(), weight, recipe)


def normalized(x, weight, other, recipe):
    return multiplied(torch.nn.functional.rms_norm(x, (WIDTH,)) * other, weight, recipe)


def padded(x, weight, other, recipe):
    return multiplied(torch.nn.functional.pad(x[:, 4:-4] * 2, (3, 5)), weight, recipe)


def long(x, weight, other, recipe):
    for step in range(8):
        x = torch.tanh(x + step) * other - step
    return multiplied(x, weight, recipe)


def read_again(x, weight, other, recipe):
    y = torch.nn.functional.silu(x) * other
    return multiplied(y, weight, recipe), y * 2


def behind_a_change(x, weight, other, recipe):
    y = x.detach() * other  # computed from what x was
    result = multiplied(y, weight, recipe)
    x.add_(1.0)
    return result, x * 1


def arguments(dtype, *, needs_grad=True):
    torch.manual_seed(0)
    shapes = (ROWS, WIDTH), (4, OUT, WIDTH), (ROWS, WIDTH)
    return [torch.randn(shape).to(dtype).requires_grad_(needs_grad) for shape in shapes]


def computing(run):
    return [launch.name for graph in run.graphs for launch in graph.launches if launch.name.startswith("triton_tem")]


def assert_same(fn, args, *, arch="h200"):
    run = run_gpu_program(fn, *args, orders=("forwards", "shuffled"), arch=arch)
    assert not run.differences, str(run.differences)
    return computing(run)


@pytest.mark.parametrize(("recipe", "arch"), [("blockwise", "h200"), ("rowwise", "h200"), ("nvfp4", "b200")])
@pytest.mark.parametrize(
    "fn",
    [product, scaled_rows, gathered, joined, numbered, normalized, padded, long, read_again],
    ids=lambda fn: fn.__name__,
)
def test_bits_of_the_reference(fn, recipe, arch):
    assert assert_same(partial(fn, recipe=recipe), arguments(torch.bfloat16), arch=arch)


@pytest.mark.parametrize(("recipe", "arch"), [("blockwise", "h200"), ("nvfp4", "b200")])
def test_a_view_is_written(recipe, arch):
    assert not assert_same(partial(transposed, recipe=recipe), arguments(torch.bfloat16), arch=arch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_values_are_rounded_to_the_input_dtype(dtype):
    assert assert_same(partial(product, recipe="blockwise"), arguments(dtype))


@pytest.mark.parametrize(("recipe", "arch"), [("blockwise", "h200"), ("nvfp4", "b200")])
def test_a_tensor_that_is_written_to_later(recipe, arch):
    torch.manual_seed(0)
    x, weight, other = arguments(torch.bfloat16, needs_grad=False)
    run = run_gpu_program(partial(behind_a_change, recipe=recipe), x, weight, other, arch=arch)
    assert not run.differences, str(run.differences)


@pytest.mark.parametrize(("recipe", "writes"), [("blockwise", False), ("rowwise", True)])
def test_the_input_is_in_memory_only_if_others_read_it(recipe, writes):
    x, weight, other = arguments(torch.bfloat16, needs_grad=False)
    (code,) = gpu_kernels(partial(product, recipe=recipe), x, weight.requires_grad_(), other)[:1]
    (kernel,) = (each for each in code.kernels if each.startswith("triton_tem"))
    assert ("tl.store(values_ptr" in code.kernel(kernel)) == writes


def test_amaxes_in_four_bits_store_what_they_are_of():
    """Codes wait for an expert's amax, so the matrix is read again: the template's output is the matrix."""
    x, weight, other = arguments(torch.bfloat16, needs_grad=False)
    (code,) = gpu_kernels(partial(product, recipe="nvfp4"), x, weight.requires_grad_(), other, arch="b200")[:1]
    (launch,) = (each for each in code.launches if each.name.startswith("triton_tem"))
    amaxes = 2 * 4 * 4  # of rows and of tokens, four experts, bytes each
    assert launch.bytes_written == 2 * x.numel() + amaxes
    assert launch.bytes_read == 2 * (2 * x.numel()) + 4 * 4, "x, other and the ends of experts"


@pytest.mark.parametrize(("recipe", "arch"), [("blockwise", "h200"), ("nvfp4", "b200")])
def test_dynamic_rows(recipe, arch):
    x, weight, other = arguments(torch.bfloat16)
    for each in (x, other):
        torch._dynamo.mark_dynamic(each, 0)
    assert assert_same(partial(product, recipe=recipe), (x, weight, other), arch=arch)
