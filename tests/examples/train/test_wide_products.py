"""On a CPU without instructions for bfloat16, contenders of `examples/train` multiply in float32, both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from examples.train import wide_products
from examples.train.model import ByteLlama, ModelShape
from examples.train.wide_products import widen_products
from fp8compile.testing import Recording

CPU = torch.device("cpu")


@pytest.fixture
def no_bfloat16(monkeypatch):
    monkeypatch.setattr(wide_products, "_cpu_multiplies_bfloat16", lambda: False)


def step(model, x, **given):
    """Output and gradients under autocast."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x, **given)
    y.backward(torch.ones_like(y))
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())]


def numbers(*shape):
    """Whole numbers, whose products and sums are exact in whatever order they are added."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


def test_products_are_those_of_bfloat16(no_bfloat16, assert_bits_equal):
    plain = nn.Sequential(nn.Linear(32, 48, bias=False))
    with torch.no_grad():
        plain[0].weight.copy_(numbers(48, 32) * 0.5)
    wide = copy.deepcopy(plain)
    widen_products(wide, CPU)
    for expected, actual in zip(step(plain, numbers(3, 5, 32)), step(wide, numbers(3, 5, 32)), strict=True):
        assert_bits_equal(actual, expected)


def test_all_products_of_a_compiled_step_are_in_float32(no_bfloat16):
    """AOTAutograd traces the backward of plain ops under the forward's autocast, in bfloat16."""
    shape = ModelShape(dim=32, layers=1, heads=2, kv_heads=1, hidden=48, seq=16)
    model, recording = ByteLlama(shape, seed=0), Recording()
    widen_products(model, CPU)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(model, fullgraph=True, backend=recording)(tokens, tokens).backward()
    nodes = [node for traced in recording.traced for node in traced.graph.nodes]
    products = [node for node in nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 3 * sum(isinstance(module, nn.Linear) for module in model.modules())
    assert {each.args[0].meta["val"].dtype for each in products} == {torch.float32}


def test_where_the_cpu_has_instructions_nothing_changes(monkeypatch):
    monkeypatch.setattr(wide_products, "_cpu_multiplies_bfloat16", lambda: True)
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    widen_products(model, CPU)
    assert type(model[0]) is nn.Linear
