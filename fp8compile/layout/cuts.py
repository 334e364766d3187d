"""Where one rank's shard of a tensor lies among the scale blocks of the whole tensor.

    block size along the sharded dim   what a block's amax needs                           kind, the same on all ranks
    1                                  nothing from other ranks                            "aligned"
    -1, the whole dim                  the maximum over the ranks                          "spanning"
    n, shards end at block ends        nothing from other ranks                            "aligned"
    n, shards end inside of blocks     the maximum over the ranks, for all blocks          "split"

If the kind is "split", a rank pads its shard in front with zeros, to a window that begins at a block boundary. Zeros
change no amax, and their codes add nothing to a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

__all__ = [
    "COLUMNS",
    "ROWS",
    "SIDES",
    "AxisBlocks",
    "DimSharding",
    "Sharding",
    "axis_blocks",
    "chunk_sizes",
    "split_axes",
]


@dataclass(frozen=True)
class DimSharding:
    """Sharding of one dim of a tensor over the ranks of a process group, in the order of the ranks."""

    # the process group, or its name; None on the meta device, if only shapes are asked
    group: ProcessGroup | str | None
    rank: int  # this rank's number in the group
    dim: int  # the dim that is cut, counted from 0
    sizes: tuple[int, ...]  # number of entries that each rank has along it

    @property
    def start(self) -> int:
        """Index of this rank's first entry in the whole dim."""
        return sum(self.sizes[: self.rank])

    @property
    def length(self) -> int:
        """Number of entries that this rank has."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Number of entries that all ranks have together."""
        return sum(self.sizes)

    def is_even(self) -> bool:
        """Whether all ranks have the same number of entries."""
        return all(size == self.sizes[0] for size in self.sizes)

    def by_name(self) -> DimSharding:
        """Return a copy that names its process group instead of holding it, and so can be copied and pickled."""
        if isinstance(self.group, str):
            return self
        return replace(self, group=self.group.group_name)  # type: ignore[union-attr]  # cuts that travel have one

    def matches(self, other: DimSharding | None) -> bool:
        """Whether ``other`` has the same shard sizes; False for None."""
        return other is not None and self.sizes == other.sizes


def chunk_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes, by rank, of the shards that DTensor and FSDP2 make of a dim of ``total`` elements.

    Full shards come first, then at most one smaller shard, then empty shards.
    """
    if total % ranks == 0:
        return (total // ranks,) * ranks
    full = -(-total // ranks)
    return tuple(max(0, min(full, total - rank * full)) for rank in range(ranks))


Sharding = tuple[DimSharding | None, ...]
ROWS, COLUMNS = SIDES = (-2, -1)  # dims of a matrix, or of each matrix of a stack


@dataclass(frozen=True)
class AxisBlocks:
    """Where a rank's rows (or columns) lie among the scale blocks of the whole matrix, or of each stacked matrix.

    An object describes rows or columns; its methods are told which as ``dim``, ``ROWS`` or ``COLUMNS``.
    """

    kind: str  # ``"aligned"``, ``"spanning"`` or ``"split"``; the table at the head of this file defines them
    groups: tuple[ProcessGroup | str, ...]  # process groups whose ranks share blocks with this rank
    block: int  # number of elements that share a scale
    # (start, length, total) of each dim that this side flattens, from the leading to the trailing one
    sizes: tuple[tuple[int, int, int], ...]

    @property
    def length(self) -> int:
        """Number of this rank's rows (or columns)."""
        return math.prod([length for _, length, _ in self.sizes])

    @property
    def total(self) -> int:
        """Number of the whole matrix's rows (or columns)."""
        return math.prod([total for _, _, total in self.sizes])

    @property
    def first(self) -> int | None:
        """Index of this rank's first row (or column) in the whole matrix; None if its rows are not consecutive."""
        run, first, inner = True, 0, 1
        for start, length, total in reversed(self.sizes):
            if not run and length != 1:
                return None
            first += start * inner
            inner *= total
            run = run and length == total
        return first

    def _positions(self, device: torch.device) -> Tensor:
        found = torch.zeros((1,), dtype=torch.int64, device=device)
        for start, length, total in self.sizes:
            found = (found.unsqueeze(1) * total + torch.arange(start, start + length, device=device)).flatten()
        return found

    def embed(self, matrix: Tensor, dim: int) -> Tensor:
        """Pad this rank's ``matrix`` with zeros along ``dim`` to a window that begins at a block boundary.

        If its rows (or columns) are neither aligned nor consecutive, the window is the whole matrix along ``dim``.
        """
        if self.kind == "aligned":
            return matrix
        if self.first is None:
            shape = list(matrix.shape)
            shape[dim] = self.total
            return matrix.new_zeros(shape).index_copy(dim, self._positions(matrix.device), matrix)
        before = self.first % self.block
        return pad(matrix, (0, 0, before, 0) if dim == ROWS else (before, 0)) if before else matrix

    def extract(self, window: Tensor, dim: int) -> Tensor:
        """Undo `embed`: take this rank's elements along ``dim`` out of a window."""
        if self.kind == "aligned":
            return window
        if self.first is None:
            return window.index_select(dim, self._positions(window.device))
        return window.narrow(dim, self.first % self.block, self.length)

    def _blocks(self) -> tuple[int, int, int]:
        """Return the index of the window's first block, and the numbers of blocks in the window and in the matrix."""
        every = -(-self.total // self.block)
        if self.first is None:
            return 0, every, every
        # an aligned part begins with a block, or is empty and lies after the last block, which may be partial
        before = 0 if self.kind == "aligned" else self.first % self.block
        return self.first // self.block, -(-(before + self.length) // self.block), every

    def window_positions(self, device: torch.device) -> Tensor:
        """Return the index in the whole matrix, int64, of each row (or column) of the window (see `embed`)."""
        if self.kind != "split":
            return self._positions(device)
        if self.first is None:
            return torch.arange(self.total, device=device)
        return torch.arange(self.first - self.first % self.block, self.first + self.length, device=device)

    def widen(self, grid: Tensor, dim: int) -> Tensor:
        """Pad a grid of this rank's blocks, such as scales, with zeros along ``dim`` to the whole tensor's grid."""
        first, count, every = self._blocks()
        if self.kind == "aligned" and self.first is None:
            shape = list(grid.shape)
            shape[dim] = every
            blocks = self._positions(grid.device)[:: self.block] // self.block
            return grid.new_zeros(shape).index_copy(dim, blocks, grid)
        after = every - first - count
        return pad(grid, (0, 0, first, after) if dim == ROWS else (first, after)) if first or after else grid

    def window(self, grid: Tensor, dim: int) -> Tensor:
        """Undo `widen`: take the blocks of this rank's window (see `embed`) out of the whole tensor's grid."""
        if self.kind == "aligned" and self.first is None:
            return grid.index_select(dim, self._positions(grid.device)[:: self.block] // self.block)
        first, count, _ = self._blocks()
        return grid.narrow(dim, first, count)


def _side(dims: range, shape: Sequence[int], cuts: Sharding, block: int) -> AxisBlocks:
    own = [[cut for cut in cuts if cut is not None and cut.dim == dim] for dim in dims]
    sizes = tuple(
        (sum(cut.start for cut in found), shape[dim], found[0].total if found else shape[dim])
        for dim, found in zip(dims, own, strict=True)
    )
    groups: tuple[Any, ...] = tuple(cut.group for found in own for cut in found)  # None where only shapes are asked
    if not groups or block == 1:
        return AxisBlocks("aligned", (), block, sizes)
    if block == -1:
        return AxisBlocks("spanning", groups, block, sizes)
    innermost = max(index for index, found in enumerate(own) if found)
    if not all(cut.is_even() for cut in own[innermost][:-1]):
        return AxisBlocks(
            "split", groups, block, sizes
        )  # parts of different sizes are cut again, so that no rank knows where others cut
    inner = math.prod([total for _, _, total in sizes[innermost + 1 :]])
    outer = math.prod([total for _, _, total in sizes[:innermost]])
    smallest = own[innermost][-1]
    starts = [sum(smallest.sizes[:rank]) for rank in range(1, len(smallest.sizes))]
    boundaries = [start * inner for start in starts if start < smallest.total]  # ranks after the end are empty
    followed = outer > 1 or len(own[innermost]) > 1  # whether elements of another part follow the last part
    if followed:
        boundaries.append(smallest.total * inner)
    cut = any(boundary % block for boundary in boundaries)
    return AxisBlocks("split" if cut else "aligned", groups, block, sizes)


def axis_blocks(
    shape: Sequence[int], cuts: Sharding, block: tuple[int, int], batch: int = 0
) -> tuple[AxisBlocks, AxisBlocks]:
    """Return where a rank's rows, and where its columns, lie among the scale blocks of the whole matrix.

    Args:
        shape: Shape of this rank's part, with one dim or more.
        cuts: How ranks shard the tensor: a `DimSharding`, or None, for each group of ranks.
        block: Rows and columns that share a scale, in the (M, K) view of the whole tensor or of each matrix.
        batch: Number of leading dims over which matrices are stacked. Sharding along these dims splits no blocks.
    """
    for cut in cuts:
        if cut is not None and type(cut.group) is not str:  # no cache keeps a group alive
            return _axis_blocks(shape, cuts, block, batch)
    try:
        return _known(tuple(shape), cuts, block, batch)
    except TypeError:  # symbolic sizes have no hash
        return _axis_blocks(shape, cuts, block, batch)


def _axis_blocks(
    shape: Sequence[int], cuts: Sharding, block: tuple[int, int], batch: int
) -> tuple[AxisBlocks, AxisBlocks]:
    last = len(shape) - 1
    return _side(range(batch, last), shape, cuts, block[0]), _side(range(last, last + 1), shape, cuts, block[1])


_known = lru_cache(maxsize=1024)(_axis_blocks)  # cached, because an eager call comes here eight times


def split_axes(shape: Sequence[int], cuts: Sharding, block: tuple[int, int], batch: int = 0) -> tuple[bool, bool]:
    """Whether shards end inside of blocks, (along rows, along columns); for the arguments see `axis_blocks`."""
    if not any(cuts):
        return False, False
    rows, columns = axis_blocks(shape, cuts, block, batch)
    return rows.kind == "split", columns.kind == "split"
