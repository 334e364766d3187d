"""Sample inputs of the ops over groups: tokens in unusual memory layouts, and all kinds of groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops import samples

__all__ = ["tokens"]

# where groups end, as fractions of the rows; rows after the last group belong to none
ENDS = ((0.5, 0.9), (0.0, 0.1, 0.1, 1.0), (0.7,), (1.0, 1.0, 1.0), (0.0, 1.0), (0.0, 0.0))


def tokens() -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices and offsets: skewed groups, empty groups, a single group. Rows after the last group hold NaN."""
    matrices = (x for x in samples.matrices() if x.ndim == 2)
    for x, ends in zip(matrices, ENDS, strict=True):
        offsets = torch.tensor([int(end * x.shape[0]) for end in ends], dtype=torch.int32)
        x[int(offsets[-1]) :] = torch.nan
        yield x, offsets
