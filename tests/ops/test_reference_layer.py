"""The layer of docs/architecture.md, in plain PyTorch, has the bits of the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fp8compile as f8

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def reference():
    """What the first block of code of the page defines."""
    found: dict = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], found)
    return found


def exact(shape, largest):
    """Values whose FP8 products a float32 sum adds without rounding, so that the order of a sum can't matter.

    Each row and each column has the largest magnitude of the format, so that the multipliers are powers of two. Small
    values are even: a product of the largest values of e4m3 and e5m2 has 25 bits, and the last of them is 0.
    """
    x = 2 * torch.randint(-3, 4, shape).float()
    rows, columns = shape
    for i in range(max(shape)):
        x[i % rows, i % columns] = largest
    return x


def gradients(linear, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(x, weight)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}


# a CPU sums tensorwise and rowwise products in float32: only of data without roundings has the order no part in it
@pytest.mark.parametrize(
    ("name", "data"),
    [("blockwise", "random"), *((name, "exact sums") for name in ("tensorwise", "rowwise", "blockwise"))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_and_gradients_have_the_bits_of_the_product(reference, assert_bits_equal, name, dtype, data):
    recipe = f8.recipes.by_name(name)
    tokens, n, k = 256, 128, 384
    if data == "random":
        x, weight, grad = (torch.randn(s) for s in ((tokens, k), (n, k), (tokens, n)))
    else:
        x, weight = exact((tokens, k), 448.0) * 0.25, exact((n, k), 448.0) * 2.0
        grad = exact((tokens, n), 448.0 if recipe.grad_output.format == "e4m3" else 57344.0)
    x, weight, grad = (each.to(dtype) for each in (x, weight, grad))
    expected = gradients(lambda x, w: f8.linear(x, w, recipe=recipe), x, weight, grad)
    found = gradients(lambda x, w: reference["ReferenceLinear"].apply(x, w, recipe), x, weight, grad)
    for what, value in found.items():
        assert value.any()
        assert_bits_equal(value, expected[what], f"{name} {what}")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_data_and_scales_have_the_bits_of_quantize(reference, assert_bits_equal, name):
    recipe = f8.recipes.by_name(name)
    x = torch.randn(256, 384, dtype=torch.bfloat16) * torch.logspace(-30, 30, 384).bfloat16()
    x[:128, :128] = 0
    for operand in ("input", "weight", "grad_output", "weight_for_grad_input", "input_for_grad_weight"):
        quantizer = getattr(recipe, operand)
        data, scale = reference["quantize"](x, quantizer)
        expected = f8.quantize(x, quantizer)
        assert_bits_equal(data.view(torch.uint8), expected.codes, f"{name} {operand} data")
        rows, columns = (size // count for size, count in zip(x.shape, expected.scale.shape, strict=True))
        grid = scale[::rows, ::columns]
        assert_bits_equal(grid.contiguous(), expected.scale, f"{name} {operand} scale")
