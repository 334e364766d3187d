"""Grouped ops for programs that leave this package: no size of a group is read, so each step takes all rows.

rows    a a b b b .     group 0: all rows as if they were its own, of which a a are taken;  group 1: b b b
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8compile.ops.groups.layout import group_of_rows

__all__ = ["OF_BACKWARD", "ON_GPU", "masks_of_groups"]

OF_BACKWARD = (
    "it is a step of a backward, along the tokens of each group, and a program does not know how many they are. "
    "Export the forward alone, under torch.no_grad()"
)
ON_GPU = "it is a kernel of this package for groups of rows on a GPU. Export the model on a CPU"


def masks_of_groups(offsets: Tensor, rows: int) -> Iterator[Tensor]:
    """Masks of the groups' rows, (rows, 1) bool, one for each group.

    Args:
        offsets: Ends of the groups, (E,).
        rows: Number of rows.
    """
    group = group_of_rows(offsets, rows).unsqueeze(1)
    for index in range(offsets.shape[0]):
        yield group == index
