"""Cached codes of experts' weights: the bits of experts that make them in each call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cached_weights import COMPILED, same
from test_convert_experts import experts, routing
from torch import nn

import fp8compile as f8
from fp8compile.tensor.weight_codes import known_codes


def trained(flags, way, recipe, *, cached):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = f8.convert(
        experts(*flags), replace(f8.recipes.by_name(recipe), weight_lifetime="step" if cached else "call")
    )
    call, optimizer = COMPILED[way](layer), torch.optim.AdamW(layer.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        for _ in range(2):
            x, index, weights = routing()
            y = call(x, index, weights)
            y.float().square().sum().backward()
            found += [y.detach().clone(), x.grad, weights.grad]
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                layer.down_proj.mul_(0.5)
    assert (known_codes(layer.down_proj) is not None) == cached
    return found + [each.detach().clone() for each in layer.parameters()]


@pytest.mark.parametrize(
    ("flags", "way", "recipe"),
    [
        (("gate",), "eager", "rowwise"),
        (("gate", "bias", "transposed"), "eager", "blockwise"),
        (("gate", "transposed"), "compiled", "mxfp8"),
        (("gate",), "eager", "nvfp4"),
    ],
)
def test_experts_have_the_bits_of_codes_that_are_made_in_each_call(flags, way, recipe):
    assert same(*(trained(flags, way, recipe, cached=cached) for cached in (False, True)))


class Experts(nn.Module):
    """As torchtitan writes them: the method is given a tensor, and no name."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 96, 64))

    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("experts were not converted")

    def forward(self, rows, offsets):
        return self._grouped_mm(A=rows, B_t=self.stack.transpose(-2, -1), offs=offsets)


def test_experts_whose_method_is_given_no_name_say_so():
    layer = f8.convert(Experts(), replace(f8.recipes.rowwise(), weight_lifetime="step"))
    with pytest.raises(ValueError, match="quantized weights of Experts can't be cached"):
        layer(torch.randn(32, 64), torch.tensor([8, 16, 32], dtype=torch.int32))
