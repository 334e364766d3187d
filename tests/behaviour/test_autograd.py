"""Autograd does with a converted model what it did before."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()


def mlp(dtype=torch.bfloat16):
    return f8.convert(nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).to(dtype), RECIPE)


def gradients(model, x, call):
    """Gradients of the parameters and of x after ``call(x).sum().backward()``."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    call(x).float().square().sum().backward()
    return [*(p.grad.clone() for p in model.parameters()), x.grad]


@behaviour("Autograd", "activation checkpointing, non-reentrant")
def test_checkpoint_non_reentrant(way, assert_bits_equal):
    model, x = mlp(), torch.randn(32, 64, dtype=torch.bfloat16)
    expected = gradients(model, x, model)
    actual = gradients(model, x, way(lambda x: checkpoint(model, x, use_reentrant=False)))
    for a, e in zip(actual, expected, strict=True):
        assert_bits_equal(a, e)
