"""The layout of transposed codes of groups: each group begins at a multiple of ``align`` columns, after padding zeros.

Tokens are sorted by group, and ``offsets``, (E,) int32, are the ends of E groups. Groups are aligned because GEMMs
read codes along tokens from multiples of 16 bytes, and because no block may have tokens of two groups.

    tokens (R)      a a a b b b b b . .          offsets (3, 8), rows after the last group belong to none
    columns (C)     a a a 0 b b b b b 0 0 0      align 4: starts 0, 4
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.quantizers import Quantizer
from fp8compile.target import target_of

__all__ = [
    "TOKEN_ALIGNMENT",
    "alignment",
    "group_of_rows",
    "group_to_read",
    "padded_length",
    "padded_offsets",
    "row_of_columns",
    "sizes_of_groups",
    "spans",
    "zero_behind",
    "zero_where_empty",
]

TOKEN_ALIGNMENT = 16  # in bytes, and so in codes: a grouped GEMM begins to read along tokens at multiples of it


def alignment(quantizer: Quantizer) -> int:
    """Return the alignment of groups in columns: the least common multiple of 16 and of the block's rows."""
    rows = quantizer.block[0]
    return TOKEN_ALIGNMENT if rows == -1 else lcm(rows, TOKEN_ALIGNMENT)


def padded_length(rows: int, groups: int, align: int) -> int:
    """Return an upper bound of the number of columns for ``rows`` tokens in ``groups`` groups, each aligned."""
    return (rows + groups * (align - 1)) // align * align


def spans(offsets: Tensor, align: int) -> Iterator[tuple[slice, slice]]:
    """Yield each group's slice of rows and slice of columns, without padding; reads ``offsets`` on the host."""
    row = column = 0
    for end in offsets.tolist():
        size = end - row
        yield slice(row, end), slice(column, column + size)
        row, column = end, column + (size if align == 1 else padded_length(size, 1, align))


def sizes_of_groups(offsets: Tensor) -> Tensor:
    """Return the number of rows of each group, (E,), in the dtype of ``offsets``."""
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def padded_offsets(offsets: Tensor, align: int) -> Tensor:
    """Return where each of E groups ends among the columns, including the group's padding, (E,) int32."""
    return ((sizes_of_groups(offsets) + (align - 1)) // align * align).cumsum(0, dtype=torch.int32)


def group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the index of each row's group, (rows,) int64; for rows after the last group, the number of groups."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True)


def group_to_read(offsets: Tensor, rows: int) -> Tensor:
    """Return the index of each row's group, (rows,) int64; for rows after the last group, the last group's index."""
    return group_of_rows(offsets, rows).clamp(max=offsets.shape[0] - 1)


def row_of_columns(offsets: Tensor, align: int, columns: int, ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the row (-1 for padding) and the group of each column of transposed codes: two (columns,) int32.

    ``ends`` says where each group ends among the columns, if not at `padded_offsets`. Padding belongs to the group
    before it.
    """
    ends = padded_offsets(offsets, align) if ends is None else ends
    column = torch.arange(columns, dtype=torch.int32, device=offsets.device)
    group = torch.searchsorted(ends, column, right=True, out_int32=True).clamp(max=offsets.shape[0] - 1)
    start = torch.cat((ends.new_zeros(1), ends))[group]
    first = torch.cat((offsets.new_zeros(1), offsets))[group]
    row = first + column - start
    return torch.where(row < offsets[group], row, -1), group


def zero_behind(rows: Tensor, offsets: Tensor) -> Tensor:
    """Zero the rows after the last group, which PyTorch's grouped GEMMs leave unwritten.

    Compiled code computes the result again in the backward instead of keeping it.
    """
    with inductor.recomputed():
        row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        return torch.where((row < offsets[-1]).unsqueeze(1), rows, 0)


def zero_where_empty(matrices: Tensor, ends: Tensor) -> Tensor:
    """Zero the products (E, ...) of groups without rows; ``ends`` are the ends of the E groups.

    From compute capability 10.0 on, PyTorch's grouped GEMMs leave these products unwritten (pytorch#172439).
    """
    if target_of(matrices.device).capability < (10, 0):
        return matrices
    is_empty = (sizes_of_groups(ends) == 0).view(-1, *[1] * (matrices.ndim - 1))
    return torch.where(is_empty, 0, matrices)
