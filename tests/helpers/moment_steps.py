"""Parameters, gradients by their step, and steps of optimizers whose moments are codes."""

from __future__ import annotations

import torch
from torch import nn

from fp8compile.testing.bits import difference

__all__ = ["differences", "gradient", "parameter", "train"]


def parameter(*shape, seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def gradient(p, step):
    draws = torch.Generator().manual_seed(1000 + step)
    return torch.randn(p.shape, generator=draws).to(p.dtype)


def train(params, optimizer, first, last):
    """Steps by gradients that are a function of the step alone."""
    for step in range(first, last):
        for p in params:
            p.grad = gradient(p, step)
        optimizer.step()


def differences(params, optimizer, others, other):
    """What differs between parameters and states of two optimizers."""
    found = []
    for mine, theirs in zip(params, others, strict=True):
        states = optimizer.state[mine], other.state[theirs]
        assert list(states[0]) == list(states[1])
        pairs = [(mine.detach(), theirs.detach()), *((states[0][key], states[1][key]) for key in states[0])]
        found += [words for pair in pairs if (words := difference(*pair)) is not None]
    return found
