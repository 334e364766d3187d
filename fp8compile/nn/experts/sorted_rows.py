"""Tokens as rows that are sorted by expert, and the weighted sum of the experts' results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.groups.routed_rows import routed_rows
from fp8compile.quantizers import Recipe

__all__ = ["SortedRows", "sorted_rows", "summed"]


class SortedRows(NamedTuple):
    """Rows of tokens, sorted by expert.

    Attributes:
        x: (R, hidden).
        weights: (R, 1): what each result is multiplied by.
        pairs: (R,): which pair of a token and an expert comes where.
        places: (R,): where each pair went.
        offsets: (E,), int32: where each expert's rows end.
        shape: (tokens, top_k).
    """

    x: Tensor
    weights: Tensor
    pairs: Tensor
    places: Tensor
    offsets: Tensor
    shape: tuple[int, int]


def _check_index(index: Tensor, num_experts: int) -> None:
    """Raise unless each index is that of an expert, or the number of experts, which means an expert elsewhere."""
    is_right = ((index >= 0) & (index <= num_experts)).all()
    rule = f"an index is 0 to {num_experts - 1}, or {num_experts} for an expert of another rank"
    if index.device.type != "cpu":
        _compat.assert_on_device(is_right, f"top_k_index: {rule}.")
    elif not is_right:
        raise ValueError(f"top_k_index has numbers from {index.min()} to {index.max()}; {rule}.")


def sorted_rows(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, num_experts: int, recipe: Recipe
) -> SortedRows:
    """A row for each pair of a token and an expert that it goes to, sorted by expert.

    Rows of experts of other ranks, or of none, have an index behind the last expert. They are sorted behind all
    groups, where `grouped_linear` reads nothing and gives zeros, in gradients too.

    Args:
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, top_k): which experts.
        top_k_weights: (tokens, top_k): what each result is multiplied by.
        num_experts: Those that this rank has.
        recipe: The quantizers that rows are multiplied by.

    Raises:
        ValueError: In eager mode, an index is that of no expert; on a GPU an assertion on the device.
    """
    if not (torch.compiler.is_compiling() or _compat.is_traced(top_k_index)):  # data, which no graph looks at
        _check_index(top_k_index, num_experts)
    # stable, so that rows of an expert are in one order wherever this runs: blocks along tokens depend on it
    experts, pairs = torch.sort(top_k_index.reshape(-1), stable=True)
    every = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(pairs.shape[0], device=pairs.device)  # scatter_ would be no code of Inductor's own
    x = routed_rows(hidden_states, pairs, places, recipe)
    weights = routed_rows(top_k_weights.reshape(-1, 1), pairs, places, recipe)
    tokens, top_k = top_k_index.shape
    return SortedRows(x, weights, pairs, places, offsets, (tokens, top_k))


def summed(y: Tensor, rows: SortedRows, recipe: Recipe) -> Tensor:
    """The weighted sum of each token's results, (tokens, hidden).

    Args:
        y: (R, hidden): what experts made of the rows.
        rows: The rows.
        recipe: The quantizers that they were multiplied by.
    """
    y = routed_rows(y * rows.weights, rows.places, rows.pairs, recipe)
    return y.view(*rows.shape, y.shape[-1]).sum(dim=1)
