"""The code that a GPU gets for experts: bytes, no wait for the host, nothing for gradients that nobody takes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.experts_bytes import experts_row
from fp8compile.testing import gpu_kernels, run_gpu_program

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
# to the least of benchmarks.experts_bytes; docs/results/bytes.md says what holds the gaps
# (what is cast is written and read before; tensorwise and mxfp8 read weights again)
MOST = {
    "rowwise_bf16_wgrad": 1.037,
    "rowwise": 1.204,
    "tensorwise": 1.284,
    "blockwise": 1.239,
    "blockwise_bf16_wgrad": 1.125,
    "mxfp8": 1.315,
    "nvfp4": 1.172,
}


@pytest.mark.parametrize("recipe", MOST)
def test_bytes_of_experts(recipe):
    row = experts_row(recipe)
    assert row["ratio"] <= MOST[recipe], row
    assert row["GEMMs"] == 6, row
    assert row["CUDA graph"] == "possible", row  # the host waits for no size of a group


def launched(recipe, *, frozen):
    with FakeTensorMode():
        arguments = experts_arguments(1024, 256, 128, 8)
        for each in arguments[1:3]:
            each.requires_grad_(requires_grad=not frozen)
        codes = gpu_kernels(lambda *args: feed_forward(*args, recipe=f8.recipes.by_name(recipe)), *arguments)
    torch._dynamo.reset()
    return [f"{launch.op or launch.name} {' '.join(launch.ops)}" for code in codes for launch in code.launches]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_frozen_weights_cost_no_codes_along_tokens(recipe):
    along_tokens = ("group_cast", "group_amax", "group_quantize.", "group_cast_transpose")
    assert any(name in launch for launch in launched(recipe, frozen=False) for name in along_tokens)
    found = launched(recipe, frozen=True)
    assert not [launch for launch in found if any(name in launch for name in along_tokens)]
    assert sum("grouped" in launch.split()[0] for launch in found) == 4, found


MXFP8 = f8.recipes.mxfp8()
BF16_WGRAD = replace(MXFP8, grad_output_for_grad_weight=None, input_for_grad_weight=None)


@pytest.mark.parametrize("recipe", [BF16_WGRAD, MXFP8], ids=["bf16_wgrad", "mxfp8"])
def test_an_expert_without_tokens_has_no_gradient_on_a_b200(recipe):
    """PyTorch's products leave it unwritten there (pytorch#172439); the executed program has NaN in such memory."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 19, 19, 40], dtype=torch.int32)
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((48, 64), (4, 32, 64)))
    run = run_gpu_program(lambda x, w: f8.grouped_linear(x, w, offsets, recipe=recipe), x, weight, arch="b200")
    assert not run.differences, str(run.differences)
    grad = run.gradients["args[1]"]
    assert grad[[0, 2]].eq(0).all()
    assert grad[[1, 3]].ne(0).any()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise", "blockwise_bf16_wgrad"])
def test_codes_of_experts_are_written_as_the_grouped_gemm_reads_them(recipe):
    """The op raises if it is given other codes, which it would have to copy."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 19, 19, 40], dtype=torch.int32)
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((48, 256), (4, 128, 256)))
    own = f8.recipes.by_name(recipe)
    run = run_gpu_program(lambda x, w: f8.grouped_linear(x, w, offsets, recipe=own), x, weight, arch="h200")
    assert not run.differences, str(run.differences)


def test_dynamic_rows_are_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, o: f8.grouped_linear(x, w, o, recipe=f8.recipes.rowwise()), fullgraph=True, backend="aot_eager"
    )
    weight = torch.randn(4, 24, 32).bfloat16().requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (40, 96, 17, 200):
            x = torch.randn(rows, 32).bfloat16().requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            offsets = torch.tensor([rows // 4, rows // 2, rows // 2, rows - 3], dtype=torch.int32)
            y = compiled(x, weight, offsets)
            expected = f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.rowwise())
            grad = torch.randn_like(y)
            found, wanted = (torch.autograd.grad(each, [x, weight], grad) for each in (y, expected))
            assert torch.equal(y, expected)
            assert all(map(torch.equal, found, wanted))
