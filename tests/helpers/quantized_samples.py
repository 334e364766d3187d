"""What the tests of QuantizedTensor quantize, and by what."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import fp8compile as f8

__all__ = ["DTYPES", "QUANTIZERS", "fake_group", "spread_values"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 16), (16, 1), (16, 16))
QUANTIZERS = (
    *(f8.CurrentScaling(block=block) for block in BLOCKS),
    f8.CurrentScaling(format="e5m2", block=(1, 16), scale="e8m0_rceil"),
    f8.CurrentScaling(block=(16, 16), scale="e8m0_floor"),
)


def fake_group(name="7", size=4, rank=2):
    return SimpleNamespace(group_name=name, size=lambda: size, rank=lambda: rank)


def spread_values(shape, dtype=torch.bfloat16):
    """Random values whose magnitude changes from row to row and column to column: no two blocks share a scale."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dim, size in enumerate(shape):
        steps = torch.arange(size) * (7 if dim == len(shape) - 1 else 3) % 11 - 5.0
        x = x * torch.exp2(steps).view(-1, *[1] * (len(shape) - dim - 1))
    return x.to(dtype)
