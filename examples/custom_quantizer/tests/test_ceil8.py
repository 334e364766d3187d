"""Ceil8: its rule against arithmetic on exponents, and that it works wherever a built-in quantizer does."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from swiglu8 import Ceil8
from torch import nn

import fp8compile as f8
from fp8compile.testing import check_quantizer

AMAX = [448.0, 448.0 * (1 + 2**-23), 224.0, 1.0, 1.75, 1.7500001, 3.4e38, 2.0**-126, 1e-40, 2.0**-149, 3.0, 7.0]


def test_it_keeps_every_contract():
    check_quantizer(Ceil8())
    check_quantizer(Ceil8(block=(-1, -1)), skip=("text_in_a_fresh_process",))


def test_the_scale_is_the_smallest_power_of_two_that_fits():
    amax = torch.tensor(AMAX)
    multiplier = Ceil8().multiplier(amax)
    for value, found in zip(amax.tolist(), multiplier.tolist(), strict=True):
        exponent = math.ceil(math.log2(value / 448)) if value >= 2.0**-126 else -127
        while math.ldexp(448, exponent) < value:  # log2 rounds
            exponent += 1
        while exponent > -127 and math.ldexp(448, exponent - 1) >= value:
            exponent -= 1
        assert found == math.ldexp(1, min(-exponent, 127)), value


def test_it_saturates_nothing_where_a_rounded_quotient_does():
    amax = torch.tensor([448.0 * (1 + 2**-23)])  # 448 / amax rounds to a number below 1, as it should
    assert amax * Ceil8().multiplier(amax) <= 448
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(-100, 100, (10_000,), generator=generator).float()
    amax = torch.rand(10_000, generator=generator).exp2() * exponent.exp2()
    multiplier = Ceil8().multiplier(amax)
    assert (amax * multiplier <= 448).all()
    assert (amax * multiplier > 224).all()


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="Ceil8: format is 'e5m2'; its rule is that of 'e4m3'"):
        Ceil8(format="e5m2")


def test_a_quantized_tensor_of_it_slices_transposes_and_pickles(assert_bits_equal):
    x = torch.randn(6, 130).bfloat16()
    q = f8.quantize(x, Ceil8())
    assert q.scale.shape == (6, 3)
    assert_bits_equal(q[2:4].dequantize(), q.dequantize()[2:4])
    assert_bits_equal(q[:, 64:].dequantize(), q.dequantize()[:, 64:])
    assert_bits_equal(q.t().dequantize(), q.dequantize().t())
    again = pickle.loads(pickle.dumps(q))
    assert again.quantizer == Ceil8()
    assert_bits_equal(again.codes, q.codes)
    with pytest.raises(TypeError, match="splits blocks of 64"):
        q[:, 3:]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_converted_to_it_trains_in_one_graph(backend, assert_bits_equal):
    def gradients(*, compiled):
        torch.manual_seed(0)
        # nothing beside the layers that rounds: what Inductor fuses, it may round otherwise than eager mode
        model = nn.Sequential(nn.Linear(128, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False)).bfloat16()
        model = f8.convert(model, f8.library.recipe(Ceil8()))
        assert all(row.converted for row in f8.conversion_report(model).rows)
        x = torch.linspace(-2, 2, 9 * 128).view(9, 128).bfloat16()
        call = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        y = call(x)
        y.float().square().mean().backward()
        return [y, model[0].weight.grad, model[2].weight.grad]

    for got, expected in zip(gradients(compiled=True), gradients(compiled=False), strict=True):
        assert expected.any()
        assert_bits_equal(got, expected)
