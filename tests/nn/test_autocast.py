"""fp8compile.linear under torch.autocast: operands are cast first, as torch.nn.functional.linear does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8

RECIPES = {"rowwise": f8.recipes.rowwise(), "tensorwise": f8.recipes.tensorwise()}
LOW = (torch.bfloat16, torch.float16)


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 32), (48, 32), (48,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def step(dtype, recipe, tensors, backend=None):
    """Output and gradients under autocast."""

    def function(x, weight, bias):
        with torch.autocast("cpu", dtype=dtype):
            return f8.linear(x, weight, bias, recipe=recipe)

    run = function if backend is None else torch.compile(function, fullgraph=True, backend=backend)
    y = run(*tensors)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return y, *(t.grad for t in tensors)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_autocast_is_an_explicit_cast(dtype, source, recipe, backend, assert_bits_equal):
    mine, reference = operands(source), operands(source)
    results = step(dtype, RECIPES[recipe], mine, backend)
    y = f8.linear(*(t.to(dtype) for t in reference), recipe=RECIPES[recipe])
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    assert results[0].dtype == dtype
    assert [grad.dtype for grad in results[1:]] == [source] * 3
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    for name, one, other in zip(names, results, (y, *(t.grad for t in reference)), strict=True):
        assert_bits_equal(one, other, name)


def test_autocast_of_inductor_is_that_of_eager_mode(assert_bits_equal):
    eager, compiled = (step(torch.bfloat16, RECIPES["rowwise"], operands(), b) for b in (None, "inductor"))
    for name, one, other in zip(("output", "grad_input", "grad_weight"), compiled[:3], eager[:3], strict=True):
        assert_bits_equal(one, other, name)
    # a sum like any other: Inductor leaves out the rounding between it and the cast to the parameter's float32
    assert_bits_equal(compiled[3].bfloat16(), eager[3].bfloat16(), "grad_bias")


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_mixed_dtypes_are_taken_under_autocast_alone(dtype, assert_bits_equal):
    x, weight, bias = operands()
    x, bias = x.detach().half(), bias.detach().bfloat16()
    with torch.autocast("cpu", dtype=dtype):
        y = f8.linear(x, weight, bias, recipe=RECIPES["rowwise"])
    expected = f8.linear(*(t.to(dtype) for t in (x, weight, bias)), recipe=RECIPES["rowwise"])
    assert_bits_equal(y, expected)
    with pytest.raises(TypeError, match="Cast one of them to the dtype of the other"):
        f8.linear(x, weight, bias, recipe=RECIPES["rowwise"])


def test_switched_off_inside_it_changes_nothing(assert_bits_equal):
    tensors = operands()
    expected = f8.linear(*tensors, recipe=RECIPES["rowwise"])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert_bits_equal(f8.linear(*tensors, recipe=RECIPES["rowwise"]), expected)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("blocks", [((-1, -1), (-1, -1)), ((1, -1), (-1, 1)), ((1, 16), (16, 16))], ids=str)
def test_products_of_quantized_tensors_do_not_look_at_autocast(blocks, backend, assert_bits_equal):
    a, b = (f8.quantize(torch.randn(32, 32), f8.CurrentScaling(block=block)) for block in blocks)

    def function(a, b):
        return f8.scaled_mm(a, b, out_dtype=torch.float32), a.dequantize()

    expected = function(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = (function if backend is None else torch.compile(function, fullgraph=True, backend=backend))(a, b)
    for one, other in zip(actual, expected, strict=True):
        assert_bits_equal(one, other)


def test_float64_is_refused_under_autocast_too():
    x, weight, bias = operands(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"`x` is torch\.float64"):
        f8.linear(x, weight, bias, recipe=RECIPES["rowwise"])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_converted_model_gives_the_dtype_of_the_unconverted_one(dtype):
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=dtype):
        expected = model(x).dtype
        assert f8.convert(model, RECIPES["rowwise"])(x).dtype == expected == dtype
        y = model(x)
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
