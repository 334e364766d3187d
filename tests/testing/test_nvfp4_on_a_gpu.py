"""NVFP4 on a GPU that isn't there: which GEMM is taken, and generated B200 programs, run."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.ops.gemm import Operand, select_gemm
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.nvfp4 import NVFP4
from fp8compile.quantizers import GEMMS, GemmConfig
from fp8compile.target import Target, pretend_target
from fp8compile.testing import gpu_kernels, run_gpu_program

RECIPE = f8.recipes.nvfp4()


def _operand(x, quantizer):
    quantizer = quantizer.for_shape(x.shape)
    amax = quantizer.amax(x)
    outer_amax = quantizer.outer_amax(amax)
    scale, outer = quantizer.block_scale(amax, outer_amax), quantizer.outer_scale(outer_amax)
    return Operand(
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
        with pytest.raises(RuntimeError, match=r"is NVFP4, which needs a GPU of compute capability 10\.0"):
            select_gemm(*arguments)
        assert select_gemm(*arguments, GemmConfig(emulate=True)) == "emulated"


def test_a_block_in_four_bits_runs_on_a_b200_as_its_reference():
    model = torch.nn.Sequential(
        torch.nn.RMSNorm(64), torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)
    )
    model = f8.convert(model.bfloat16(), RECIPE)
    run = run_gpu_program(model, torch.randn(48, 64).bfloat16().requires_grad_(), arch="b200")
    assert not run.differences, run.differences
    assert [product.name for product in run.products].count("nvfp4_mm") == 6


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")  # Triton 3.9, once a process
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
