"""The bounds of groups as Python integers, for CPU kernels that loop over the groups."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8compile.ops.groups.layout import padded_length

__all__ = ["spans"]


def spans(offsets: Tensor, align: int) -> Iterator[tuple[slice, slice]]:
    """For each group, the slice of its rows and the slice of its transposed codes' columns, without padding.

    Args:
        offsets: Ends of the groups among the rows, (E,) int32; read on the host.
        align: Groups begin at multiples of this number of columns.
    """
    row = column = 0
    for end in offsets.tolist():
        size = end - row
        yield slice(row, end), slice(column, column + size)
        row, column = end, column + (size if align == 1 else padded_length(size, 1, align))
