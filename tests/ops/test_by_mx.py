"""Codes with other scales than MX has, multiplied by the MX GEMM: the same values, and only where a GPU has it."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.cli.explain.sections import gpu_sections, graph_sections
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.by_mx import BLOCKWISE_BY_MX, SCALED_BY_MX
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.quantizers import GemmConfig
from fp8compile.target import Target, pretend_target
from fp8compile.testing import run_gpu_program
from fp8compile.testing.explain import explain
from fp8compile.testing.explain.graphs import GraphGemm, code_sizes
from fp8compile.testing.explain.recipe_support import recipe_support
from fp8compile.testing.explain.roofline import PEAKS, gemm_seconds
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.program.products import scaled_mm

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
LINE, TILE = ((f8.CurrentScaling(block=block, scale="pow2")) for block in ((1, 128), (128, 128)))
ROW, WHOLE = f8.CurrentScaling(block=(1, -1)), f8.CurrentScaling(block=(-1, -1))


def operand(x, quantizer):
    found = f8.quantize(x, quantizer)
    return Quantized(codes=found.codes, scale=found.scale, quantizer=quantizer)


@pytest.fixture
def multiplied(monkeypatch):
    """The product of a GEMM as an RTX 5090 gets its operands, with the GPU's requirements checked."""
    monkeypatch.setattr(torch, "_scaled_mm", functools.partial(scaled_mm, GPUS["rtx5090"]))

    def product(gemm, a, b, out_dtype):
        with pretend_target(GPUS["rtx5090"].target):
            return gemm.multiply(a, b.t(), out_dtype, GemmConfig(by_mx=True))

    return product


@pytest.mark.parametrize("of_b", [LINE, TILE], ids=["1x128", "128x128"])
@pytest.mark.parametrize(("m", "k", "n"), [(3, 200, 136), (130, 96, 16)], ids=str)
def test_blocks_have_their_values_by_mx(m, k, n, of_b, multiplied, assert_bits_equal):
    x, w = torch.randn(m, k), torch.randn(n, k)
    x[0, :128], x[1, :128], x[2, 5] = 3e38, 2.0**-140, torch.nan  # the largest and the smallest scales, and none
    w[:, :64] = 0
    a, b = operand(x, LINE), operand(w, of_b)
    assert a.scale[1, 0] == 2.0**-127
    expected = EMULATED.multiply(a, b.t(), torch.float32, GemmConfig())
    assert_bits_equal(multiplied(BLOCKWISE_BY_MX, a, b, torch.float32), expected)
    assert expected.isnan().any()


@pytest.mark.parametrize("quantizer", [ROW, WHOLE], ids=["rowwise", "tensorwise"])
def test_scales_of_1_leave_the_sum_as_it_is(quantizer, multiplied, assert_bits_equal):
    a, b = operand(torch.randn(5, 72), quantizer), operand(torch.randn(24, 72), quantizer)
    codes = [each.codes.view(torch.float8_e4m3fn).double() for each in (a, b)]
    expected = ((codes[0] @ codes[1].t()).float() * a.scale * b.scale.t()).to(BF16)
    assert_bits_equal(multiplied(SCALED_BY_MX, a, b, BF16), expected)


def kinds(recipe, capability):
    with pretend_target(Target("cuda", capability)):
        return recipe_support(recipe, CUDA)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], ids=str)
def test_blocks_of_float32_scales_are_refused_with_the_advice(capability):
    assert {each.kind for each in kinds(f8.recipes.blockwise(scale="pow2"), capability)} == {"blockwise_by_mx"}
    refused = kinds(f8.recipes.blockwise(), capability)
    assert {each.kind for each in refused} == {"none"}
    assert all("Use fp8compile.recipes.blockwise(scale='pow2')" in each.detail for each in refused)


def test_blocks_keep_the_gemm_that_hopper_has():
    assert {each.kind for each in kinds(f8.recipes.blockwise(scale="pow2"), (9, 0))} == {"blockwise"}
    assert "needs compute capability 9.0" in kinds(f8.recipes.blockwise(scale="pow2"), (8, 9))[0].detail


@pytest.mark.parametrize("make", [f8.recipes.tensorwise, f8.recipes.rowwise])
def test_rows_take_mx_only_where_it_is_asked_for_and_faster(make):
    asked = make(by_mx=True)
    assert {each.kind for each in kinds(asked, (12, 0))} == {"scaled_by_mx"}
    assert "MX GEMM with scales of 1" in kinds(asked, (12, 0))[0].detail
    for capability in ((8, 9), (9, 0), (10, 0), (12, 1)):
        assert kinds(asked, capability) == kinds(make(), capability)
    assert kinds(make(), (12, 0))[0].kind != "scaled_by_mx"
    assert select_gemm(ROW, ROW.transposed(), torch.device("cpu"), BF16, GemmConfig(by_mx=True)) == select_gemm(
        ROW, ROW.transposed(), torch.device("cpu"), BF16
    )


@pytest.mark.parametrize("make", [f8.recipes.tensorwise, f8.recipes.rowwise])
def test_a_refusal_of_rows_names_what_the_gpu_lacks_and_not_the_option(make):
    for asked in (False, True):  # this GEMM is the first of the table, whose reason is told
        (first, *_) = kinds(make(by_mx=asked), (8, 0))
        assert first.kind == "none"
        assert "needs a GPU with FP8 tensor cores" in first.detail


def model(recipe):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(72, 48, bias=False)).bfloat16()
    return f8.convert(layer, recipe, filter=lambda *_: True), torch.randn(40, 72, dtype=BF16, requires_grad=True)


@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("b300", f8.recipes.blockwise(scale="pow2")),
        ("rtx5090", f8.recipes.rowwise(by_mx=True)),
    ],
    ids=["b300, blockwise", "rtx5090, rowwise"],
)
def test_programs_multiply_by_mx_to_the_bit(arch, recipe):
    pytest.importorskip("triton", reason="generated GPU code needs Triton")
    run = run_gpu_program(*model(recipe), arch=arch)
    products = [product for graph in run.graphs for product in graph.products]
    assert run.differences == ()
    assert [product.operands[2].dtype for product in products] == [torch.float8_e8m0fnu] * 3


@pytest.mark.parametrize(("arch", "gains"), [("rtx5090", True), ("rtx_pro_6000", False)])
def test_explain_names_the_gemm_and_says_where_it_gains_nothing(arch, gains):
    layer, x = model(f8.recipes.rowwise(by_mx=True))
    found = explain(layer, (x,), gpu=arch)
    lines = [line for part in (*graph_sections(found), *gpu_sections(found)) for line in part.lines]
    assert "GEMMs of converted layers: scaled_by_mx (3)." in lines
    assert any(line.startswith("by_mx=True has no benefit on this GPU") for line in lines) != gains


def test_the_roofline_of_a_5090_has_the_rate_of_mx():
    rows = {"layer": "a", "gemm": "output", "op": "", "runs": "", "is_fp8": True, "in_bytes": 2, "out_bytes": 2}
    sizes = {"m": 8192, "k": 8192, "n": 8192}
    pairs = ((ROW, ROW.transposed()), (LINE, TILE.transposed()))
    for (a, b), asked in itertools.product(pairs, (False, True)):
        gemm = GraphGemm(**rows, **sizes, **code_sizes(a, b, GemmConfig(by_mx=asked)))
        rate = 838e12 if asked or a is LINE else 419e12
        assert gemm_seconds(gemm, PEAKS["rtx5090"]) == 2 * 8192**3 / rate
        assert gemm_seconds(gemm, PEAKS["b200"]) == 2 * 8192**3 / 4500e12
