"""The feed-forward of a mixture of experts: gate and up in one, SwiGLU, down, weights of the router.

As transformers and torchtitan have it behind the router: tokens are sorted by expert, so every product is grouped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

import fp8compile as f8
from fp8compile import Recipe
from fp8compile.library import Observed

__all__ = ["Experts", "experts_arguments", "feed_forward"]


def multiplied(x: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe | None, observer: Any = None) -> Tensor:
    """Rows by the matrices of their groups; without a recipe by PyTorch, rows behind the last group made zeros."""
    if recipe is not None:
        return f8.grouped_linear(x, weight, offsets, recipe=recipe, observer=observer)
    y = grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return y.masked_fill((row >= offsets[-1]).unsqueeze(1), 0.0)


def feed_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    offsets: Tensor,
    recipe: Recipe | None = None,
    observers: tuple[Any, Any] = (None, None),
) -> Tensor:
    """The experts' part, on rows sorted by expert.

    Args:
        x: (rows, dim).
        gate_up: (experts, 2 * hidden, dim).
        down: (experts, dim, hidden).
        weights: (rows, 1), of the router.
        offsets: (experts,), int32: where each expert's rows end.
        recipe: None for bfloat16.
        observers: Where statistics of both products go.
    """
    gate, up = multiplied(x, gate_up, offsets, recipe, observers[0]).chunk(2, -1)
    return multiplied(silu(gate) * up, down, offsets, recipe, observers[1]) * weights


class Experts(Observed, nn.Module):
    """`feed_forward` as a module, which a `fp8compile.Monitor` can observe; arguments are those of `feed_forward`."""

    observed_weights = ("gate_up", "down")

    def __init__(self, gate_up: Tensor, down: Tensor, recipe: Recipe) -> None:
        super().__init__()
        self.gate_up, self.down, self.recipe = nn.Parameter(gate_up.detach()), nn.Parameter(down.detach()), recipe

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """As `feed_forward`."""
        observers = self.observer("gate_up"), self.observer("down")
        return feed_forward(x, self.gate_up, self.down, weights, offsets, self.recipe, observers)


def experts_arguments(
    rows: int, dim: int, hidden: int, experts: int, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Tensors for `feed_forward`, of any values."""
    shapes = (rows, dim), (experts, 2 * hidden, dim), (experts, dim, hidden), (rows, 1)
    tensors = [torch.empty(shape, dtype=dtype).requires_grad_() for shape in shapes]
    return (*tensors, torch.empty(experts, dtype=torch.int32))
