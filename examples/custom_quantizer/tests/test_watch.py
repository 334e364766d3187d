"""Watch: the bits of what it wraps, the right counts, in every mode, and the amax before and after a reduction."""

from __future__ import annotations

import math

import pytest
import torch
from swiglu8 import Ceil8, clear, observe, seen, watch

import fp8compile as f8
from fp8compile.testing import check_op, check_quantizer


@pytest.fixture(autouse=True)
def nothing_seen():
    clear()


@pytest.mark.parametrize("inner", [Ceil8(), f8.CurrentScaling(block=(1, 32), scale="e8m0_floor")], ids=repr)
def test_a_watched_quantizer_keeps_every_contract(inner):
    check_quantizer(watch(inner, "checked"), skip=() if inner == Ceil8() else ("text_in_a_fresh_process",))


def test_the_op_keeps_every_contract():
    check_op(observe)


def values():
    x = torch.full((3, 64), 2.0**-20)
    x[:, 0] = torch.tensor([448.0, -448.0, 1.0])
    x[2, 1] = math.nan
    return x


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_what_passes_is_counted_in_every_mode(backend, assert_bits_equal):
    quantizer = watch(Ceil8(), "layer")

    def fn(x):
        quantized = f8.quantize(x, quantizer)
        return quantized.codes, quantized.scale

    call = fn if backend is None else torch.compile(fn, fullgraph=True, backend=backend)
    codes, scale = call(values())
    expected = f8.quantize(values(), Ceil8())
    assert_bits_equal(codes, expected.codes)
    assert_bits_equal(scale, expected.scale)
    found = seen()["layer"]
    assert (found.elements, found.zeros, found.saturated, found.nan) == (192, 126, 2, 64)
    assert math.isnan(found.amax)
    assert math.isnan(found.group_amax)
    call(torch.ones(2, 64))
    assert seen()["layer"].elements == 192 + 128


def test_labels_are_counted_apart_and_forgotten():
    f8.quantize(torch.ones(2, 64), watch(Ceil8(), "a"))
    f8.quantize(2 * torch.ones(2, 64), watch(Ceil8(), "b"))
    assert (seen()["a"].amax, seen()["b"].amax, seen()["b"].group_amax) == (1.0, 2.0, 2.0)
    clear()
    assert seen() == {}


def test_every_operand_of_a_compiled_training_step_is_seen(assert_bits_equal):
    def step(quantizer):
        torch.manual_seed(0)
        layer = f8.Linear(64, 128, bias=False, recipe=f8.library.recipe(quantizer), dtype=torch.bfloat16)
        x = torch.ones(5, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(layer, fullgraph=True)(x).sum().backward()
        return layer.weight.grad, x.grad

    for got, expected in zip(step(watch(Ceil8(), "step")), step(Ceil8()), strict=True):
        assert_bits_equal(got, expected)
    x, weight, grad = 5 * 64, 64 * 128, 5 * 128
    assert seen()["step"].elements == 2 * (x + weight + grad)


def test_a_mismatched_wrapper_is_refused():
    with pytest.raises(
        ValueError, match=r"Watch: format and block are 'e4m3', \(-1, -1\), inner has .*; use watch\(\)"
    ):
        type(watch(Ceil8()))(inner=Ceil8())
