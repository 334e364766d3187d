"""The model: embedding, feed-forward blocks, head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Model"]


class Block(nn.Module):
    """RMSNorm and SwiGLU, and the input added."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to the same."""
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Tokens (rows, length) to the mean loss of the next ones, shape ()."""

    def __init__(self, *, vocabulary: int = 256, dim: int = 64, hidden: int = 128, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each token of the ones before it."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())
