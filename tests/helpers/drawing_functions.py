"""Functions that draw random numbers, for tests/testing/gpu/test_random_numbers.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@triton.jit
def drawing_kernel(uniform_ptr, normal_ptr, words_ptr, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(uniform_ptr + at, tl.rand(seed, at))
    tl.store(normal_ptr + at, tl.randn(seed, at))
    first, second, third, fourth = tl.randint4x(seed, at)
    tl.store(words_ptr + at * 4, first)
    tl.store(words_ptr + at * 4 + 1, second)
    tl.store(words_ptr + at * 4 + 2, third)
    tl.store(words_ptr + at * 4 + 3, fourth)


class Block(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 48), nn.Linear(48, 32), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.down(self.dropout(self.up(x).relu())))


def drawn(x: Tensor) -> Tensor:
    return torch.rand(x.shape), torch.randn(x.shape), torch.randint(-3, 17, x.shape)


def by_a_kernel(x: Tensor) -> Tensor:
    uniform, normal = torch.empty_like(x), torch.empty_like(x)
    words = torch.empty(4 * x.numel(), dtype=torch.int32)
    drawing_kernel[(x.numel() // 64,)](uniform, normal, words, 123456789123456789, BLOCK=64)
    return uniform + x, normal, words


def _dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.transpose(1, 2), 0.5).contiguous()


def checkpointed(x: Tensor) -> Tensor:
    """Draws again in the backward, by places in another order."""
    return checkpoint(_dropped, x, use_reentrant=False) * 2
