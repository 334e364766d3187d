"""Routes: sends rows of tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile import _compat
from fp8compile.nn.layer.raise_on_all_ranks import FOUND, raise_on_all
from fp8compile.ops.collectives import all_reduce_extreme, all_to_all
from fp8compile.ops.exchange.dispatch import combine, dispatch
from fp8compile.ops.exchange.row_order import fitting
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.tensor.check_arguments import group_name, shown

__all__ = ["Routes", "check_capacity", "expert_routes"]

OUTPUT = GEMMS[0]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Sends this rank's rows to the ranks of their experts, and the results back; created by `expert_routes`.

    Attributes:
        offsets: (E,), int32, the end of the rows of each of this rank's E experts, for `fp8compile.grouped_linear`.
        overflow: (), int64, the number of this rank's rows that exceeded the capacity; 0 without a capacity.
        sent: (R, E), int64, the number of rows that this rank has for each of the E experts of each of the R ranks.
        received: (R, E), int64, the number of rows that each rank has for each expert of this rank.
        sizes: (2, R), int64, on the host: the number of rows sent to each rank, and received from each rank. None if
            there is a capacity.
        capacity: The number of rows that each rank sends to each other rank; None if it sends all its rows.
        group: The name of the process group.
    """

    offsets: Tensor
    overflow: Tensor
    sent: Tensor
    received: Tensor
    sizes: Tensor | None
    capacity: int | None
    group: str

    def dispatch(self, rows: Tensor, *, recipe: Recipe | None = None) -> Tensor:
        """Send rows to the ranks of their experts, and receive the rows for this rank's experts.

        Args:
            rows: (N, K), sorted by expert, with the counts that `expert_routes` was given. Rows after the last
                expert are not sent.
            recipe: Recipe of the layer that reads the rows. Rows are sent in FP8 with its input quantizer, unless a
                GEMM reads the input in high precision. None sends the rows unquantized.

        Returns:
            (M, K), the dtype of ``rows``, sorted by this rank's experts; dequantized if they were sent in FP8. With a
            capacity, M is the capacity times the ranks, and rows after the last expert are zeros. Without a capacity,
            M is the number of rows received.
        """
        length = None if self.capacity is None else self.capacity * self.sent.shape[0]
        how = Recipe() if recipe is None else recipe
        return dispatch(rows, self.sent, self.received, self.sizes, length, OUTPUT.a, how, self.group)

    def combine(self, grouped: Tensor, length: int, *, recipe: Recipe | None = None) -> Tensor:
        """Send rows back, unquantized, to the ranks from which `dispatch` received them.

        Args:
            grouped: (M, K), the experts' results of K features, in the order of `dispatch`'s result.
            length: N, the number of rows that this rank passed to `dispatch`.
            recipe: Recipe of the layer that computed the rows. In the backward, the gradient is sent in FP8 with its
                gradient quantizer. None sends the gradient unquantized.

        Returns:
            (N, K), in the order of the rows passed to `dispatch`; zeros for rows that were not sent.
        """
        how = Recipe() if recipe is None else recipe
        return combine(grouped, self.sent, self.received, self.sizes, length, how, self.group)


def check_capacity(function: str, capacity: object) -> None:
    """Raise a ValueError that names ``function`` unless ``capacity`` is None or a positive int of rows."""
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise ValueError(
            f"{function}: `capacity` is {shown(capacity)}; it must be None or an int of at least 1, the number of "
            "rows that a rank may send to another."
        )


def _check(counts: object, ranks: int, capacity: object) -> None:
    if not isinstance(counts, Tensor) or counts.ndim != 1 or counts.dtype not in (torch.int32, torch.int64):
        what = f"{counts.dtype} of shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else shown(counts)
        raise TypeError(
            f"expert_routes: `counts` must be int64 or int32, the rows for each expert of all ranks, got {what}."
        )
    if counts.shape[0] == 0 or counts.shape[0] % ranks:
        raise ValueError(
            f"expert_routes: `counts` has {counts.shape[0]} experts, which can't be divided equally among the "
            f"{ranks} ranks of the group."
        )
    check_capacity("expert_routes", capacity)


def _is_read(counts: Tensor) -> bool:
    return not torch.compiler.is_compiling() and not _compat.is_fake(counts)


def _overflow(sent: Tensor, received: Tensor, capacity: int, error: Exception | None, group: str) -> Tensor:
    """Return how many rows of this rank don't fit the ``capacity``; in eager mode raise if any rank has such rows.

    All ranks of ``group`` raise then, and also if one rank passes an ``error``.
    """
    found = sent.sum() - fitting(sent, capacity).sum()
    if not _is_read(found):
        return found
    most = sent.sum(1).max()
    if sent.shape[0] > 1:
        most = all_reduce_extreme(most, "max", group)
    rows, least = torch.stack((most, received.min())).tolist()
    _raise_found(least, error, group)
    if rows > capacity:
        raise ValueError(
            f"expert_routes: a rank has {rows} rows for the experts of another rank, but `capacity` is {capacity}. "
            "Increase capacity, or omit it, so that the host reads the number of rows."
        )
    return found


def _sizes(sent: Tensor, received: Tensor, error: Exception | None, group: str) -> Tensor:
    """Return the numbers of rows sent to and received from each of R ranks, (2, R), on the host.

    If one rank passes an ``error``, all ranks of ``group`` raise.
    """
    sizes = torch.stack((sent.sum(1), received.sum(1))).cpu()
    if _is_read(sizes):
        _raise_found(int(sizes.min()), error, group)
    return sizes


def _raise_found(least: int, error: Exception | None, group: Any) -> None:
    if least < 0 and torch.distributed.get_backend(_resolve_process_group(group)) != "fake":  # which sends nothing
        raise_on_all("expert_routes", error, group)


def expert_routes(
    counts: Tensor, *, group: ProcessGroup, capacity: int | None = None, error: Exception | None = None
) -> Routes:
    """Exchange the numbers of rows that each rank has for each expert. All ranks of the group must call this.

    Without a capacity, messages are not padded, and the host synchronizes once with the device to read the numbers of
    rows. With a capacity, each rank sends ``capacity`` rows to each other rank, padded with zeros. Compiled code then
    never synchronizes; eager mode does once, to check the capacity.

    Args:
        counts: (R * E,), int64 or int32, the number of rows that this rank has for each expert. The E experts of the
            first rank come first, then the E experts of the second rank.
        group: The R ranks.
        capacity: Maximum number of rows that one rank sends to another. Further rows raise an error in eager mode. In
            compiled code they are not sent, `combine` returns zeros for them, and ``overflow`` counts them.
        error: An error that this rank found in its rows, in eager mode. It is sent instead of ``counts``, whose values
            are ignored. All ranks of the group raise it, so that no rank waits for rows that never arrive.

    Returns:
        The routes, for one call of `Routes.dispatch`.

    Raises:
        TypeError: ``counts`` is not a tensor of integers, or ``group`` is not a process group.
        ValueError: The number of experts is not a multiple of the ranks, the capacity is not a positive int, or rows
            exceed the capacity in eager mode.
        RuntimeError: A rank passed an ``error``; the message contains the errors of all ranks. If all ranks passed the
            same error, that error is raised instead.
    """
    name = group_name("expert_routes", group)
    if name is None:
        raise TypeError("expert_routes: `group` is None; it must be a process group. One rank needs no routes.")
    ranks = group.size()
    _check(counts, ranks, capacity)
    sent = counts.to(torch.int64).view(ranks, -1)
    sent = sent if error is None else torch.full_like(sent, FOUND)
    received = all_to_all(sent, None, None, name) if ranks > 1 else sent
    fits = received if capacity is None else fitting(received, capacity)
    sizes = _sizes(sent, received, error, name) if capacity is None else None
    return Routes(
        offsets=fits.sum(0).cumsum(0, dtype=torch.int32),
        overflow=sent.new_zeros(()) if capacity is None else _overflow(sent, received, capacity, error, name),
        sent=sent,
        received=received,
        sizes=sizes,
        capacity=capacity,
        group=name,
    )
