"""All kernels of a feed-forward and of experts, assembled for the GPUs that people own: nothing spills, all fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8

pytest.importorskip("triton", reason="needs Triton: it compiles to PTX, and brings ptxas")

from benchmarks.gpu_resources import RECIPES, resources_of
from fp8compile.testing import gpu_kernels
from fp8compile.testing.gpu.compiled import compiled_kernels
from fp8compile.testing.gpu.cubin import assembled, kernel_resources
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import schedule

CASES = [
    (arch, block, recipe) for arch, blocks in RECIPES.items() for block, names in blocks.items() for recipe in names
]
# the least shared memory, the multiplying kernels and the casts of groups
# the cast of SwiGLU's rows, a row in four warps, spills 8 registers there; no GPU has timed it
SPILLS = {("gb10", "experts", "rowwise"): "72 registers, 32 bytes spilled"}
QUICK = {("rtx4090", "experts", "rowwise")}


@pytest.mark.parametrize(
    ("arch", "block", "recipe"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK), id=", ".join(case)) for case in CASES],
)
def test_every_kernel_of_a_program_fits_its_gpu(arch, block, recipe):
    found = resources_of(arch, block, recipe)
    assert len(found.generated) > 3
    assert bool(found.ours) >= (block == "experts")
    allowed = SPILLS.get((arch, block, recipe), "nothing spills")
    unfit = [each for each in found.unfit if allowed not in each]
    assert not unfit, "\n".join(unfit)


def test_kernels_inside_of_our_operators_are_compiled_as_they_are_launched():
    recipe, gpu = f8.recipes.blockwise(), GPUS["rtx5090"]
    with FakeTensorMode():
        x = torch.empty(256, 96, dtype=torch.bfloat16, requires_grad=True)
        weight, ends = torch.empty(4, 64, 96, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
        (graph, *_) = gpu_graphs(lambda *args: f8.grouped_linear(*args, recipe=recipe), (x, weight, ends), gpu)
        found = schedule(graph, gpu)
    product, *_ = [each for each in compiled_kernels(found.source, gpu) if each.name.startswith("rows_kernel")]
    assert product.arguments["a_ptr"] == product.arguments["b_ptr"] == "*u8"
    assert product.arguments["y_ptr"] == "*bf16"
    assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" in product.ptx
    stages = assembled(product, gpu).shared_bytes // (2 * 128 * 128)
    assert 1 < stages <= gpu.shared_memory_per_block_optin // (2 * 128 * 128)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_a_gpu_emulates_is_compiled_for_it(name):
    """With PyTorch 2.11 float8 numbers became float64 in one conversion, on which Triton 3.6 aborts (an H200 did)."""
    layer = f8.Linear(24, 40, bias=False, recipe=replace(f8.recipes.by_name(name), emulate=True), dtype=torch.bfloat16)
    x = torch.randn(5, 24, dtype=torch.bfloat16, requires_grad=True)
    for code in gpu_kernels(layer, x, arch="h200"):
        assert kernel_resources(code.source, GPUS["h200"])
