"""The bounds of groups as numbers on the host, for CPU kernels that take one group after the other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8compile.ops.groups.layout import padded_length

__all__ = ["spans"]


def spans(offsets: Tensor, align: int) -> Iterator[tuple[slice, slice]]:
    """The rows of each group, and the columns of its transposed codes without padding.

    Args:
        offsets: Ends of the groups among the rows, (E,) int32; read on the host.
        align: Number whose multiples groups begin at.
    """
    row = column = 0
    for end in offsets.tolist():
        size = end - row
        yield slice(row, end), slice(column, column + size)
        row, column = end, column + (size if align == 1 else padded_length(size, 1, align))
