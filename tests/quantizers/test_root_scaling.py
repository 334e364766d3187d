"""RootScaling: codes of roots, none of them 0 where a value is above 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moments_by_hand import dequantized, quantized

import fp8compile as f8
from fp8compile import ops
from fp8compile.quantizers import RootScaling
from fp8compile.quantizers.scale_rules import exact_root


def squares(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).square()


def test_codes_and_values_are_those_by_hand(assert_bits_equal):
    x = squares(16, 300) * torch.exp2(torch.randint(-40, 40, (16, 1)).float())
    own = f8.quantize(x, RootScaling(block=(1, 128)))
    codes, scale = quantized(x.numpy(), root=True, seed=None, step=0)
    assert_bits_equal(own.codes, torch.from_numpy(codes))
    assert_bits_equal(own.scale, torch.from_numpy(scale))
    assert_bits_equal(own.dequantize(), torch.from_numpy(dequantized(codes, scale, root=True)))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_value_beside_any_neighbour_is_not_zero(rounding):
    x = torch.full((1, 128), 1e-30)
    x[0, 0], x[0, 1] = 1e30, 0.0
    own = f8.quantize(x, RootScaling(block=(1, 128), rounding=rounding))
    assert own.codes[0, :3].tolist() == [0x7E, 0, 1]
    assert (own.dequantize()[0, 2:] > 0).all()


def test_a_value_that_is_not_small_has_two_bits_of_mantissa():
    x = (
        squares(64, 128) + 0.05
    )  # roots from 0.22 to 4 are normal codes, half of 2**-3 off at most; a square doubles it
    error = (f8.quantize(x, RootScaling(block=(1, 128))).dequantize() - x).abs() / x
    assert error.max() < 2 * 2**-4 * (1 + 2**-4)


@pytest.mark.parametrize("value", [torch.nan, -1.0, torch.inf])
def test_what_has_no_root_makes_its_block_nan(value):
    x = squares(2, 256)
    x[1, 200] = value
    found = f8.quantize(x, RootScaling(block=(1, 128))).dequantize()
    assert found.isnan().any(1).tolist() == [False, True]
    assert found[1, :128].isfinite().all()
    assert found[1, 128:].isnan().all()


def test_it_is_a_constant_and_a_layer_of_a_graph(assert_bits_equal):
    quantizer = RootScaling(block=(1, 128), rounding="stochastic")
    assert eval(repr(quantizer), {"RootScaling": RootScaling}) == quantizer
    assert quantizer != f8.CurrentScaling(block=(1, 128), rounding="stochastic")

    def codes(x):
        multiplier, scale = ops.scale(ops.amax(x, quantizer), quantizer)
        return ops.cast(x, multiplier, quantizer), scale

    x = squares(8, 200)
    for found, expected in zip(torch.compile(codes, fullgraph=True)(x), codes(x), strict=True):
        assert_bits_equal(found, expected)


def test_exact_root_is_correctly_rounded(assert_bits_equal):
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    assert_bits_equal(exact_root(x), torch.from_numpy(np.sqrt(x.numpy())))
