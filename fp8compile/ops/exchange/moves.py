"""Where rows go between what a rank has, what it sends, what it gets, and what its experts read.

    rows       sorted by expert, of all ranks' experts         e0 e0 e1 e2 e2 e2 e3
    slots      what goes to one rank after the other           to rank 0: e0 e0 e1     to rank 1: e2 e2 e2 e3
    buffer     what came, from one rank after the other        from rank 0: e0 e0 e1   from rank 1: e0 e1 e1
    grouped    what came, sorted by expert of this rank        e0 e0 e0 e1 e1 e1

Rows of an expert keep the order of ranks and, from one rank, the order that they had there. It is the order that one
process has them in, if ranks have parts of its tokens one after the other: blocks along tokens are the same ones.

Where each rank's part has a fixed number of places, its capacity, places that are left over hold zeros. Otherwise
parts lie one behind the other, and slots are the rows as they are.

Letters: R ranks of the group, E experts of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false

__all__ = ["Moves", "fitting", "take"]


def fitting(counts: Tensor, capacity: int) -> Tensor:
    """How many rows of each expert fit, (R, E) int64: those of a rank's first experts before those of its last.

    Args:
        counts: (R, E), int64: rows of each expert.
        capacity: How many rows fit for each of the R ranks.
    """
    ends = counts.cumsum(1).clamp(max=capacity)
    return torch.diff(ends, dim=1, prepend=ends.new_zeros((ends.shape[0], 1)))


def _starts(sizes: Tensor) -> Tensor:
    """Where each part begins if parts lie one behind the other, in the order of the flattened tensor."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


def _sources(length: int, to: Tensor, at: Tensor, sizes: Tensor) -> Tensor:
    """Which row each of ``length`` places takes, (length,) int64; -1 for a place that stays empty.

    Args:
        length: How many places there are.
        to: Where each part is put, (parts,), not falling.
        at: Where each part lies now, (parts,).
        sizes: How many rows each part has, (parts,).
    """
    place = torch.arange(length, device=to.device)
    part = (torch.searchsorted(to.contiguous(), place, right=True) - 1).clamp(min=0)
    row = place - to[part]
    return torch.where(row < sizes[part], at[part] + row, -1)


def take(rows: Tensor, sources: Tensor) -> Tensor:
    """The rows at these places; zeros where a place is -1."""
    if guard_or_false(rows.shape[0] == 0):
        return rows.new_zeros((sources.shape[0], *rows.shape[1:]))
    return torch.where((sources >= 0).unsqueeze(1), rows[sources.clamp(min=0)], 0)


@dataclass(frozen=True)
class Moves:
    """The four ways between rows, slots, buffer and grouped rows.

    Attributes:
        sent: (R, E), int64: rows that this rank has for each expert of each rank.
        received: (R, E), int64: rows that each rank has for each expert of this one.
        capacity: Places for each rank's part; None where parts lie one behind the other.
    """

    sent: Tensor
    received: Tensor
    capacity: int | None

    def _fitting(self, counts: Tensor) -> Tensor:
        return counts if self.capacity is None else fitting(counts, self.capacity)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where rows for each rank begin, where their slots begin, and how many go there, (R,) each."""
        sizes, rows = self._fitting(self.sent).sum(1), self.sent.sum(1)
        begins = _starts(rows)
        if self.capacity is None:
            return begins, begins, sizes
        return begins, torch.arange(sizes.shape[0], device=sizes.device) * self.capacity, sizes

    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where rows of each expert from each rank lie in the buffer and among grouped rows, and how many, (R, E)."""
        sizes = self._fitting(self.received)
        buffer = _starts(sizes)
        if self.capacity is not None:
            ranks = torch.arange(sizes.shape[0], device=sizes.device).unsqueeze(1)
            buffer = buffer - buffer[:, :1] + ranks * self.capacity
        return buffer, _starts(sizes.t()).t(), sizes

    def rows_of_slots(self, length: int) -> Tensor:
        """Which row each slot takes, of ``length`` slots."""
        rows, slots, sizes = self._parts()
        return _sources(length, slots, rows, sizes)

    def slots_of_rows(self, length: int) -> Tensor:
        """Which slot each row came from, of ``length`` rows."""
        rows, slots, sizes = self._parts()
        return _sources(length, rows, slots, sizes)

    def buffer_of_grouped(self, length: int) -> Tensor:
        """Which place of the buffer each grouped row takes, of ``length``."""
        buffer, grouped, sizes = (each.t().flatten() for each in self._pieces())
        return _sources(length, grouped, buffer, sizes)

    def grouped_of_buffer(self, length: int) -> Tensor:
        """Which grouped row each place of the buffer came from, of ``length``."""
        buffer, grouped, sizes = (each.flatten() for each in self._pieces())
        return _sources(length, buffer, grouped, sizes)
