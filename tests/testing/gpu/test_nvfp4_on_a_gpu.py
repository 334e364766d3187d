"""NVFP4 on a GPU that isn't there: which GEMM is taken, and generated B200 programs, run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped import table
from fp8compile.ops.gemms.grouped.grouped_nvfp4_mm import grouped_nvfp4_mm
from fp8compile.ops.gemms.grouped.nvfp4 import NVFP4 as GROUPED
from fp8compile.ops.gemms.nvfp4 import NVFP4
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.ops.groups.group_outer_amaxes import group_outer_amaxes
from fp8compile.ops.layer import operands, output_and_gradients, quantize_groups
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.ops.layer.operands import Phase
from fp8compile.quantizers import GEMMS, GemmConfig
from fp8compile.target import Target, pretend_target
from fp8compile.testing import eager_run, gpu_kernels, run_gpu_program

RECIPE = f8.recipes.nvfp4()


def _operand(x, quantizer):
    quantizer = quantizer.for_shape(x.shape)
    amax = quantizer.amax(x)
    outer_amax = quantizer.outer_amax(amax)
    scale, outer = quantizer.block_scale(amax, outer_amax), quantizer.outer_scale(outer_amax)
    return Quantized(
        codes=quantizer.cast(x, quantizer.multiplier(amax)), scale=scale, quantizer=quantizer, outer_scale=outer
    )


@pytest.mark.parametrize("shape", [(48, 64, 32), (37, 23, 19), (150, 90, 17)], ids=str)
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_operands_in_the_layout_of_a_gpu_multiply_to_the_same_bits(gemm, shape, assert_bits_equal):
    m, k, n = shape
    given = {"output": ((m, k), (n, k)), "grad_input": ((m, n), (n, k)), "grad_weight": ((m, n), (m, k))}[gemm.name]
    tensors = [torch.randn(size) for size in given]
    a, b = gemm.oriented(*(_operand(x, q) for x, q in zip(tensors, RECIPE.quantizers(gemm), strict=True)))
    arguments = a, b, torch.float32, GemmConfig()
    assert_bits_equal(NVFP4.multiply(*arguments), EMULATED.multiply(*arguments))


def test_a_b200_has_the_gemm_and_an_h200_says_what_has():
    line = f8.TwoLevelScaling()
    arguments = (line, line.transposed(), torch.device("cpu"), torch.bfloat16)
    with pretend_target(Target("cuda", (10, 0))):
        assert select_gemm(*arguments) == "nvfp4"
    with pretend_target(Target("cuda", (9, 0))):
        with pytest.raises(RuntimeError, match=r"is NVFP4, which needs compute capability 10\.0"):
            select_gemm(*arguments)
        assert select_gemm(*arguments, GemmConfig(emulate=True)) == "emulated"


def _run_of_a_block(recipe):
    model = torch.nn.Sequential(
        torch.nn.RMSNorm(64), torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)
    )
    model = f8.convert(model.bfloat16(), recipe)
    return run_gpu_program(model, torch.randn(48, 64).bfloat16().requires_grad_(), arch="b200")


def test_a_block_whose_gradients_the_hardware_rounds_differs_in_their_codes_and_what_comes_of_them():
    run = _run_of_a_block(f8.recipes.nvfp4(grad_rounding="stochastic_hardware"))
    assert run.differences, "other noise"
    assert all(str(each).startswith("backward") for each in run.differences)
    (first,) = [str(each) for each in run.differences if "product 0" in str(each)]
    assert "left operand" in first, "codes of the first gradient, and not their scales"


def test_a_block_in_four_bits_runs_on_a_b200_as_its_reference():
    run = _run_of_a_block(RECIPE)
    assert not run.differences, run.differences
    assert [product.name for product in run.products].count("nvfp4_mm") == 6


def _groups(gemm, features, ends):
    """Arguments of a product of groups, NaN behind the last of them."""
    offsets, (n, k) = torch.tensor(ends, dtype=torch.int32), features
    x, grad, weight = torch.randn(ends[-1] + 9, k), torch.randn(ends[-1] + 9, n), torch.randn(len(ends), n, k)
    x[ends[-1] :] = grad[ends[-1] :] = torch.nan
    tensors = {"output": (x, weight), "grad_input": (grad, weight), "grad_weight": (grad, x)}
    a, b = (each.bfloat16() for each in tensors[gemm.name])
    bias = (None,) if gemm.name == "output" else ()
    dtype = (torch.bfloat16,) if gemm.name == "grad_weight" else ()
    return Phase.EAGER, a, b, *bias, *dtype, LayerArgs.of(offsets, [], [], UNSHARDED, RECIPE)


@pytest.mark.parametrize("ends", [(40, 40, 200), (0, 3, 3), (130, 258, 259)], ids=str)
@pytest.mark.parametrize("features", [(64, 96), (19, 23), (150, 34)], ids=str)
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_groups_in_the_layout_of_a_gpu_multiply_to_the_same_bits(gemm, features, ends, assert_bits_equal, monkeypatch):
    args, product = _groups(gemm, features, ends), getattr(output_and_gradients, gemm.name)
    expected = product(*args)
    for module in (operands, quantize_groups):
        monkeypatch.setattr(module, "is_four_bits_on_gpu", lambda x, quantizer: True)
    monkeypatch.setattr(table, "_tiers", lambda: ((replace(GROUPED, lacks=lambda problem: None),),))
    table._selected.cache_clear()
    try:
        assert_bits_equal(product(*args), expected)
    finally:
        table._selected.cache_clear()


def test_which_groups_of_quantizers_the_kernels_take():
    offsets, line = torch.tensor([3, 8], dtype=torch.int32), f8.TwoLevelScaling()
    pillar = f8.TwoLevelScaling(block=(16, 1), packed="columns", scale="torchao")
    for rows, columns, directions in ((pillar, pillar, "rows"), (line, line, "tokens"), (line, pillar, "both")):
        with pytest.raises(
            ValueError, match=r"group_outer_amaxes: .* Choose them as fp8compile.recipes.nvfp4\(\) does"
        ):
            group_outer_amaxes(torch.randn(8, 32), offsets, rows, columns, directions)


def test_what_a_gpus_grouped_product_does_not_take():
    groups, line = 1025, f8.TwoLevelScaling(packed="none")
    codes, matrices = torch.zeros(8, 16, dtype=torch.uint8), torch.zeros(groups, 16, 16, dtype=torch.uint8)
    scales = torch.zeros(128, 4, dtype=torch.uint8), torch.zeros(groups, 512, dtype=torch.uint8)
    offsets, ones = torch.zeros(groups, dtype=torch.int32), torch.ones(groups)
    with pretend_target(Target("cuda", (10, 0))), pytest.raises(ValueError, match=r"1025 groups, .* at most 1024"):
        grouped_nvfp4_mm(codes, matrices, *scales, ones, ones, offsets, torch.bfloat16)
    a, b = (
        Quantized(codes=each, scale=scale, quantizer=line, outer_scale=ones)
        for each, scale in zip((codes, matrices), scales, strict=True)
    )
    with pytest.raises(ValueError, match="not packed as the GPU requires"):
        GROUPED.rows(a, b, offsets, torch.bfloat16, GemmConfig())


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter")
def test_experts_in_four_bits_run_on_a_b200_as_their_reference():
    """Two experts, of which one has no tokens, NaN behind them."""
    x, weight = torch.randn(40, 32).bfloat16(), torch.randn(2, 48, 32).bfloat16()
    x[33:] = torch.nan
    offsets = torch.tensor([0, 33], dtype=torch.int32)
    leaves = x.requires_grad_(), weight.requires_grad_()

    def experts(x, weight, offsets):
        return f8.grouped_linear(x, weight, offsets, recipe=RECIPE)

    run, eager = run_gpu_program(experts, *leaves, offsets, arch="b200"), eager_run(experts, *leaves, offsets)
    assert not run.differences, run.differences
    assert [product.name for product in run.products] == ["grouped_nvfp4_mm"] * 3
    assert all(map(torch.equal, run.outputs, eager.outputs))
    assert all(torch.equal(grad, eager.gradients[name]) for name, grad in run.gradients.items())


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it")
def test_codes_of_a_layer_are_made_without_values_laid_down_in_between():
    m, k, n = 4096, 2048, 1024
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer = f8.Linear(k, n, bias=False, dtype=torch.bfloat16, recipe=RECIPE)
        (code,) = gpu_kernels(layer, torch.randn(m, k, dtype=torch.bfloat16), arch="b200")
    made = (2 + 2 + 0.5) * (m * k + n * k)  # read for amaxes, read for codes, written
    product = 0.5 * (m * k + n * k) + 2 * m * n
    # Amaxes, multipliers and scales of sixteen values are float32 between kernels: 1/8 of the input, written and read
    # some four times. One pass of values in float32 would be 8 bytes an element more, a factor of 2.
    assert code.bytes <= 1.25 * (made + product)
