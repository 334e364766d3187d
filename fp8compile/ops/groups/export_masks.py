"""Masks that replace group sizes in exported programs, which can't read the sizes on the host.

Each step computes all rows for every group, and a mask selects the rows of the group.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8compile.ops.groups.padding import group_of_rows

__all__ = ["OF_BACKWARD", "ON_GPU", "masks_of_groups"]

OF_BACKWARD = (
    "it is part of a backward and sums over the tokens of each group, whose number an exported program does not "
    "know. Export only the forward, under torch.no_grad()"
)
ON_GPU = "it is a GPU kernel of this package for groups of rows. Export the model on a CPU"


def masks_of_groups(offsets: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield for each group the mask of its rows, (rows, 1) bool; ``offsets`` are the ends of the groups."""
    group = group_of_rows(offsets, rows).unsqueeze(1)
    for index in range(offsets.shape[0]):
        yield group == index
