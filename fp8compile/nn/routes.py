"""Routes: how rows of tokens reach the ranks of their experts, and come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile import _compat
from fp8compile.nn.found_by_one import FOUND, raise_on_all
from fp8compile.nn.state import group_name
from fp8compile.ops.collectives import all_reduce_extreme, all_to_all
from fp8compile.ops.exchange.dispatch import combine, dispatch
from fp8compile.ops.exchange.moves import fitting
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.tensor import shown

__all__ = ["Routes", "check_capacity", "expert_routes"]

OUTPUT = GEMMS[0]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """How this rank's rows reach the ranks of their experts, and come back; `expert_routes` makes it.

    Attributes:
        offsets: (E,), int32: where the rows of each of this rank's E experts end, as `fp8compile.grouped_linear` takes
            it.
        overflow: (), int64: how many rows of this rank did not fit; 0 without a capacity.
        sent: (R, E), int64: rows that this rank has for each expert of each of the R ranks.
        received: (R, E), int64: rows that each rank has for each expert of this one.
        sizes: (2, R), int64, on the host: rows sent to each rank, received from each; None with a capacity.
        capacity: How many rows any rank sends to any other; None: as many as there are.
        group: The name of the group.
    """

    offsets: Tensor
    overflow: Tensor
    sent: Tensor
    received: Tensor
    sizes: Tensor | None
    capacity: int | None
    group: str

    def dispatch(self, rows: Tensor, *, recipe: Recipe | None = None) -> Tensor:
        """Send rows to the ranks of their experts, and get those of this rank's.

        Args:
            rows: (N, K), sorted by expert; what counts say. Rows behind the last expert stay.
            recipe: That of the layer which reads the rows: its codes of an input travel, unless a product reads the
                input in high precision. None: rows travel as they are.

        Returns:
            (M, K), the dtype of ``rows``, sorted by this rank's experts; the values of the codes, where codes
            travelled. With a capacity M is that times the ranks, zeros behind the last expert; else as many as came.
        """
        length = None if self.capacity is None else self.capacity * self.sent.shape[0]
        how = Recipe() if recipe is None else recipe
        return dispatch(rows, self.sent, self.received, self.sizes, length, OUTPUT.a, how, self.group)

    def combine(self, grouped: Tensor, length: int, *, recipe: Recipe | None = None) -> Tensor:
        """Send rows back to where they came from, as they are.

        Args:
            grouped: (M, K), as `dispatch` sorts them.
            length: N, how many rows the rank gave to `dispatch`.
            recipe: That of the layer which made the rows: in the backward its codes of a gradient travel. None: the
                gradient travels as it is.

        Returns:
            (N, K), in the order in which `dispatch` was given rows; zeros for rows that were not sent.
        """
        how = Recipe() if recipe is None else recipe
        return combine(grouped, self.sent, self.received, self.sizes, length, how, self.group)


def check_capacity(function: str, capacity: object) -> None:
    """Raise a ValueError, in the function's name, unless a capacity is a positive number of rows or None."""
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise ValueError(
            f"{function}: capacity is {shown(capacity)}; it is how many rows a rank may send to another, an int of at "
            "least 1, or None."
        )


def _check(counts: object, ranks: int, capacity: object) -> None:
    if not isinstance(counts, Tensor) or counts.ndim != 1 or counts.dtype not in (torch.int32, torch.int64):
        what = f"{counts.dtype} of shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else shown(counts)
        raise TypeError(f"expert_routes: counts is {what}; it is int64 or int32, rows of each expert of all ranks.")
    if counts.shape[0] == 0 or counts.shape[0] % ranks:
        raise ValueError(
            f"expert_routes: counts has {counts.shape[0]} experts, and the group {ranks} ranks; each rank has as many "
            "experts as the others, at least one."
        )
    check_capacity("expert_routes", capacity)


def _is_read(counts: Tensor) -> bool:
    """Whether the host can read the numbers: in eager mode, on a device with data."""
    return not torch.compiler.is_compiling() and not _compat.is_fake(counts)


def _overflow(sent: Tensor, received: Tensor, capacity: int, error: Exception | None, group: str) -> Tensor:
    """Number of rows that do not fit. In eager mode, if there are any, it raises on all ranks, so none waits."""
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
            f"expert_routes: a rank has {rows} rows for the experts of another, and capacity is {capacity}. Give "
            "more, or leave capacity out, so that the host reads how many there are."
        )
    return found


def _sizes(sent: Tensor, received: Tensor, error: Exception | None, group: str) -> Tensor:
    """Numbers of rows that go to each rank and come from each rank, on the host, (2, R)."""
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
    """Exchange the numbers of rows that each rank has for each expert. All ranks of the group call it.

    Without a capacity, messages are as long as rows are many: the host reads the numbers, once, and waits for the
    device to know them. With one, no number is read: each rank sends so many rows to each other, zeros among them.

    Args:
        counts: (R * E,), int64 or int32: rows that this rank has for each expert; E experts of the first rank, then
            those of the second.
        group: The R ranks.
        capacity: How many rows fit in the message of one rank to another. Rows that do not fit raise in eager mode.
            In compiled code the last ones of a message stay behind, `combine` gives zeros for them, and ``overflow``
            counts them.
        error: What this rank found wrong with its rows, in eager mode. It travels in the place of ``counts``, of which
            the shape alone is read, and all ranks of the group raise it: none waits for rows that do not come.

    Returns:
        The routes, for one call of `Routes.dispatch`.

    Raises:
        TypeError: ``counts`` is no tensor of integers, or the group none.
        ValueError: Experts are no multiple of ranks, the capacity is none, or, in eager mode, rows do not fit.
        RuntimeError: A rank has given an ``error``; with the texts of all that did. Where all have given the same one,
            it is raised itself.
    """
    name = group_name("expert_routes", group)
    if name is None:
        raise TypeError("expert_routes: group is None; on one rank alone rows are where their experts are.")
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
