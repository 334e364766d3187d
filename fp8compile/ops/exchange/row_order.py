"""Four orders of a rank's rows in expert parallelism, and indices that move rows between them.

    rows       sorted by expert, over all ranks' experts       e0 e0 e1 e2 e2 e2 e3
    slots      in the order of the ranks to which they go      to rank 0: e0 e0 e1     to rank 1: e2 e2 e2 e3
    buffer     received, in the order of sending ranks         from rank 0: e0 e0 e1   from rank 1: e0 e1 e1
    grouped    received, sorted by expert of this rank         e0 e0 e0 e1 e1 e1

A single process with the tokens of all ranks gets the order "grouped" too, and so the same blocks along tokens. With a
capacity, each rank's part of a message has room for a fixed number of rows; without one, slots and rows are the same.

Letters: R ranks of the group, E experts of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false

__all__ = ["Moves", "fitting", "take"]


def fitting(counts: Tensor, capacity: int) -> Tensor:
    """Return how many rows of each expert fit if each rank gets at most ``capacity`` rows, (R, E) int64.

    ``counts``, (R, E), has the numbers of all rows. A rank's room is filled in the order of its experts.
    """
    ends = counts.cumsum(1).clamp(max=capacity)
    return torch.diff(ends, dim=1, prepend=ends.new_zeros((ends.shape[0], 1)))


def _starts(sizes: Tensor) -> Tensor:
    """Return the offset of each part if parts of these sizes follow one another."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


def _sources(length: int, to: Tensor, at: Tensor, sizes: Tensor) -> Tensor:
    """Return the source row of each of ``length`` rows of a result, int64; -1 for a row of zeros.

    Rows move in parts of ``sizes`` rows: ``to`` has each part's offset in the result, ascending; ``at`` has each
    part's offset in the source.
    """
    place = torch.arange(length, device=to.device)
    part = (torch.searchsorted(to.contiguous(), place, right=True) - 1).clamp(min=0)
    row = place - to[part]
    return torch.where(row < sizes[part], at[part] + row, -1)


def take(rows: Tensor, sources: Tensor) -> Tensor:
    """Take rows by the indices ``sources``, (length,); an index of -1 gives zeros."""
    if guard_or_false(rows.shape[0] == 0):
        return rows.new_zeros((sources.shape[0], *rows.shape[1:]))
    return torch.where((sources >= 0).unsqueeze(1), rows[sources.clamp(min=0)], 0)


@dataclass(frozen=True)
class Moves:
    """Indices that move rows between the orders rows, slots, buffer and grouped of the module docstring.

    Attributes:
        sent: Number of rows that this rank has for each of E experts of each of R ranks, (R, E) int64.
        received: Number of rows that each rank has for each expert of this rank, (R, E) int64.
        capacity: Number of rows that each rank's part of a message has room for; None if parts follow one another
            without gaps.
    """

    sent: Tensor
    received: Tensor
    capacity: int | None

    def _fitting(self, counts: Tensor) -> Tensor:
        return counts if self.capacity is None else fitting(counts, self.capacity)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes, rows = self._fitting(self.sent).sum(1), self.sent.sum(1)
        begins = _starts(rows)
        if self.capacity is None:
            return begins, begins, sizes
        return begins, torch.arange(sizes.shape[0], device=sizes.device) * self.capacity, sizes

    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self._fitting(self.received)
        buffer = _starts(sizes)
        if self.capacity is not None:
            ranks = torch.arange(sizes.shape[0], device=sizes.device).unsqueeze(1)
            buffer = buffer - buffer[:, :1] + ranks * self.capacity
        return buffer, _starts(sizes.t()).t(), sizes

    def rows_of_slots(self, length: int) -> Tensor:
        """Return, for each slot of the sent messages, the index of its row, (length,) int64; -1 for an unused slot."""
        rows, slots, sizes = self._parts()
        return _sources(length, slots, rows, sizes)

    def slots_of_rows(self, length: int) -> Tensor:
        """Return, for each row, the index of its slot in the sent messages, (length,) int64; -1 if it has no slot."""
        rows, slots, sizes = self._parts()
        return _sources(length, rows, slots, sizes)

    def buffer_of_grouped(self, length: int) -> Tensor:
        """Return, for each row sorted by expert, its index in the received buffer, (length,) int64; -1 if unused."""
        buffer, grouped, sizes = (each.t().flatten() for each in self._pieces())
        return _sources(length, grouped, buffer, sizes)

    def grouped_of_buffer(self, length: int) -> Tensor:
        """Return, for each received row, its index among rows sorted by expert, (length,) int64; -1 if unused."""
        buffer, grouped, sizes = (each.flatten() for each in self._pieces())
        return _sources(length, buffer, grouped, sizes)
