"""fp8compile::cast_transpose and quantize_weight: their Triton kernels are their PyTorch twins, bit for bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import fp8compile as f8
from fp8compile.ops import cast_transpose
from fp8compile.ops.cast_transpose import is_pair
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT
from fp8compile.ops.layer.output_and_gradients import for_gradients_of
from fp8compile.target import pretend_target

ROWS, COLUMNS = f8.CurrentScaling(block=(1, 128)), f8.CurrentScaling(block=(128, 1))
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: it is its interpreter")


@needs_triton
@pytest.mark.parametrize("arch", ["h200", "rtx4090"])
def test_the_kernels_are_their_twins_bit_for_bit_and_make_the_golden_vectors(arch):
    """An H200's conversion to float8 rounds once and saturates; for an RTX 4090 the kernels do so themselves."""
    from interpreted_kernels import comparisons

    from fp8compile.testing.gpu.gpus import GPUS
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter

    interpreter = Interpreter(Arithmetic(float8_by_float16=arch == "rtx4090"))
    with interpreter.active(), pretend_target(GPUS[arch].target):
        differing = dict(comparisons())  # for each case, how many elements of each output differ
    for case in ("planted", "planted in weights"):
        assert all(differing.pop(case)), f"{case}: each output of another quantizer differs somewhere"
    wrong = {case: counts for case, counts in differing.items() if any(counts)}
    assert not wrong, wrong
    assert sum(case.startswith("CurrentScaling") for case in differing) == 24 * 4
    assert sum(case.startswith("stack") for case in differing) == 6
    assert sum(case.startswith("columns") for case in differing) == 3
    assert sum(case.startswith("weight") for case in differing) == 24 * 4
    assert sum(case.startswith("every bfloat16") for case in differing) == 2
    golden = sum(case.startswith("golden") for case in differing)
    assert golden == 35 + 24 + 48 + 4, golden  # 1x128, 128x1, MX 1x32, MX 32x1


def test_the_op_is_two_casts_in_the_layouts_of_the_gemms(assert_bits_equal):
    x = torch.randn(200, 300)
    codes, scale, column_codes, column_scale = cast_transpose(x, ROWS, COLUMNS)
    rows, columns = f8.quantize(x, ROWS), f8.quantize(x, COLUMNS)
    assert_bits_equal(codes, rows.codes, "codes")
    assert_bits_equal(scale.contiguous(), rows.scale, "scale")
    assert_bits_equal(column_codes.contiguous(), columns.codes, "codes along columns")
    assert_bits_equal(column_scale, columns.scale, "scale along columns")
    assert scale.stride() == (1, 200)
    assert column_codes.stride() == (1, 200)
    assert column_scale.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (ROWS, COLUMNS, True),
        (f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil"), f8.CurrentScaling(block=(32, 1), format="e5m2"), True),
        (ROWS, None, False),
        (ROWS, f8.CurrentScaling(block=(32, 1)), False),
        (COLUMNS, ROWS, False),
        (f8.CurrentScaling(block=(1, 96)), f8.CurrentScaling(block=(96, 1)), False),
        (f8.CurrentScaling(block=(1, -1)), f8.CurrentScaling(block=(-1, 1)), False),
        (f8.CurrentScaling(), f8.CurrentScaling(), False),
    ],
    ids=str,
)
def test_which_pairs_the_kernel_takes(rows, columns, expected):
    assert is_pair(rows, columns) is expected


def test_a_backward_of_one_gradient_quantizes_for_that_alone():
    recipe = f8.recipes.blockwise()
    of_x, of_weight = (for_gradients_of(recipe, x=x, weight=not x) for x in (True, False))
    assert of_x.quantizers(GRAD_INPUT) == recipe.quantizers(GRAD_INPUT)
    assert of_weight.quantizers(GRAD_WEIGHT) == recipe.quantizers(GRAD_WEIGHT)
    assert of_x.quantizers(GRAD_WEIGHT) is None
    assert of_weight.quantizers(GRAD_INPUT) is None
    assert for_gradients_of(recipe, x=True, weight=True) == recipe
