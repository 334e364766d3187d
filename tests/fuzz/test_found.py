"""What the fuzzer found, as it was found: a test each, in its smallest form."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8


def _codes_and_scale(x, quantizer):
    q = f8.quantize(x, quantizer)
    return q.codes, q.scale


@pytest.mark.parametrize("block", [(16, 16), (16, 1)])
def test_one_dynamic_graph_for_fewer_rows_than_a_block_has(block, assert_bits_equal):
    # A guard said that there is one block; Inductor did not broadcast it, and every row but the first read memory
    # behind the multipliers (PyTorch 2.11 and 2.13).
    x, quantizer = torch.randn(3, 17).bfloat16(), f8.CurrentScaling(block=block)
    compiled = torch.compile(_codes_and_scale, fullgraph=True, dynamic=True)
    for name, actual, expected in zip(
        ("codes", "scale"), compiled(x, quantizer), _codes_and_scale(x, quantizer), strict=True
    ):
        assert_bits_equal(actual, expected, name)


def test_a_quantized_scalar_can_not_be_cut():
    # it was a ZeroDivisionError
    with pytest.raises(IndexError, match="with at least one dim, got shape"):
        f8.quantize(torch.tensor(1.0), f8.CurrentScaling())[0:]


def test_operands_on_two_devices_are_not_multiplied():
    # the result was on the device of the first, whatever it was made of
    a, b = (f8.quantize(torch.randn(16, 16), f8.CurrentScaling()) for _ in range(2))
    with pytest.raises(ValueError, match="scaled_mm: a is on meta, but b is on cpu"):
        f8.scaled_mm(a.to("meta"), b, out_dtype=torch.bfloat16)
