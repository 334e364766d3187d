"""The blocks that FP8 libraries are compared on, at the sizes of models that people train; bfloat16.

mlp         RMSNorm, SwiGLU, residual
attention   RMSNorm, q, k, v, attention, o, residual: no rotation of q and k, which is the same for everyone
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.mlp import Mlp, converted

__all__ = ["SHAPES", "Attention", "Shape", "block"]


@dataclass(frozen=True)
class Shape:
    """A decoder layer: width, hidden width, heads, heads of k and v, width of a head."""

    d: int
    h: int
    heads: int
    kv_heads: int
    head_dim: int = 128


# Source: config.json of meta-llama/Meta-Llama-3-8B and of Qwen/Qwen3-8B
SHAPES = {
    "llama3-8b": Shape(d=4096, h=14336, heads=32, kv_heads=8),
    "qwen3-8b": Shape(d=4096, h=12288, heads=32, kv_heads=8),
    "tiny": Shape(d=64, h=128, heads=2, kv_heads=1, head_dim=32),
}


class Attention(nn.Module):
    """``x + o(attention(q(norm(x)), k(norm(x)), v(norm(x))))``, causal, over one sequence."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.norm = nn.RMSNorm(shape.d, dtype=dtype)
        self.q = nn.Linear(shape.d, inner, bias=False, dtype=dtype)
        self.k = nn.Linear(shape.d, kv, bias=False, dtype=dtype)
        self.v = nn.Linear(shape.d, kv, bias=False, dtype=dtype)
        self.o = nn.Linear(inner, shape.d, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """X (M, d); the result the same shape."""
        normed = self.norm(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(len(x), -1))

    def _heads(self, x: Tensor) -> Tensor:
        """(1, heads, M, head_dim), heads of k and v as often as those of q share them."""
        heads = x.view(1, len(x), -1, self.shape.head_dim).transpose(1, 2)
        times = self.shape.heads // heads.shape[1]
        return heads.repeat_interleave(times, dim=1) if times > 1 else heads


def block(kind: str, contender: str, m: int, shape: Shape, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """A block as the contender runs it, and an input (m, d) that requires grad."""
    with torch.device(device):
        model = Mlp(shape.d, shape.h) if kind == "mlp" else Attention(shape)
        x = torch.randn(m, shape.d, dtype=torch.bfloat16, requires_grad=True)
    return converted(contender, model), x
