"""Sort tokens into rows by expert, and sum the experts' results by weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.groups.routed_rows import routed_rows
from fp8compile.quantizers import Recipe

__all__ = ["SortedRows", "sorted_rows", "summed"]


class SortedRows(NamedTuple):
    """Rows of tokens sorted by expert, with the router's weight and the token of each row."""

    x: Tensor  # (R, hidden), the rows; R = tokens * top_k
    weights: Tensor  # (R, 1), the factor of each row's result
    pairs: Tensor  # (R,), for each row, the index of its pair of a token and an expert, token * top_k + k
    places: Tensor  # (R,), for each pair, the index of its row; the inverse permutation of ``pairs``
    offsets: Tensor  # (E,), int32, the end of each expert's rows
    shape: tuple[int, int]  # (tokens, top_k)


def _check_index(index: Tensor, num_experts: int) -> None:
    """Raise a ValueError, or assert on a GPU, unless 0 <= index <= ``num_experts`` (an expert of another rank)."""
    is_right = ((index >= 0) & (index <= num_experts)).all()
    rule = f"indices must be from 0 to {num_experts - 1}, or {num_experts} for an expert of another rank"
    if index.device.type != "cpu":
        _compat.assert_on_device(is_right, f"top_k_index: {rule}.")
    elif not is_right:
        raise ValueError(f"top_k_index has values from {index.min()} to {index.max()}; {rule}.")


def sorted_rows(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, num_experts: int, recipe: Recipe
) -> SortedRows:
    """Make a row for each pair of a token and one of its experts, sorted by expert.

    The index ``num_experts`` stands for another rank's expert, or for no expert. Rows with this index come last:
    `grouped_linear` does not read them, and returns zeros for them; their gradients are zeros.

    Args:
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, top_k), the experts of each token.
        top_k_weights: (tokens, top_k), the factor of each expert's result.
        num_experts: Number of this rank's experts.
        recipe: The recipe of the GEMMs that read the rows.
    """
    if not (torch.compiler.is_compiling() or _compat.is_traced(top_k_index)):  # a graph can't look at the data
        _check_index(top_k_index, num_experts)
    # stable, so that an expert's rows have the same order on every device: blocks along tokens depend on it
    experts, pairs = torch.sort(top_k_index.reshape(-1), stable=True)
    every = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(pairs.shape[0], device=pairs.device)  # Inductor has no code of its own for scatter_
    x = routed_rows(hidden_states, pairs, places, recipe)
    weights = routed_rows(top_k_weights.reshape(-1, 1), pairs, places, recipe)
    tokens, top_k = top_k_index.shape
    return SortedRows(x, weights, pairs, places, offsets, (tokens, top_k))


def summed(y: Tensor, rows: SortedRows, recipe: Recipe) -> Tensor:
    """Return the sum of the results of each token's experts, times the router's weights: (tokens, hidden).

    ``y`` is (R, hidden), the experts' results for the R ``rows``. ``recipe`` is the recipe of the experts' GEMMs.
    """
    y = routed_rows(y * rows.weights, rows.places, rows.pairs, recipe)
    return y.view(*rows.shape, y.shape[-1]).sum(dim=1)
