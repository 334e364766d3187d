"""Models with planted faults, each line that is one marked by its name. The tests look the lines up."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn

__all__ = ["Broken", "Recompiled", "Uncached", "line_of"]


def line_of(fault: str) -> int:
    """The line marked ``# fault: NAME``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# fault: {fault}")]
    return number


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class Fingerprint:
    """A key that Dynamo can't hash: it can't run hashlib."""

    def __hash__(self):
        return int.from_bytes(hashlib.md5(b"key").digest()[:4], "big")  # fault: hash


class Broken(nn.Module):
    """Breaks in four places."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.key = Fingerprint()
        self.table = {self.key: 2.0}

    def forward(self, x):
        x = self.linear(x)
        print("shape", x.shape)  # fault: print
        if x.sum() > 0:  # fault: branch
            x = x + 1
        scale = x.mean().item()  # fault: item
        x = x * self.table[self.key]  # fault: unhashable
        return x * scale


class Recompiled(nn.Module):
    """One graph a shape, and one a mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x)).relu()


class Uncached(nn.Module):
    """An autograd.Function keeps the graph out of the cache."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Sine.apply(self.linear(x))  # fault: autograd.Function
