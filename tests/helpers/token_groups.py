"""Tokens in groups of every kind, for tests of what is quantized and multiplied group by group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Sizes of groups, rows behind the last, and whether the last group has a NaN and an infinity.

    Attributes:
        name: For ids of tests.
        sizes: Of each group.
        tail: Rows that belong to none; NaN.
        has_special: Whether the last group has a NaN and an infinity.
    """

    name: str
    sizes: tuple[int, ...]
    tail: int = 0
    has_special: bool = False

    def __str__(self) -> str:
        return self.name

    def offsets(self) -> Tensor:
        """Ends of the groups."""
        return torch.tensor(self.sizes).cumsum(0).to(torch.int32)

    def rows(self) -> list[slice]:
        """The rows of each group."""
        ends = self.offsets().tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def tokens(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Magnitudes over many powers of two, the first columns zeros."""
        end = sum(self.sizes)
        shape = end + self.tail, columns
        generator = torch.Generator().manual_seed(sum(shape))
        x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
        x[:, : columns // 8] = 0
        if self.has_special:
            x[end - 1, columns // 2], x[end - 2, columns // 2 + 1] = torch.nan, -torch.inf
        x[end:] = torch.nan
        return x.to(dtype)


GROUPS = (
    Groups("even", (40, 40, 40)),
    Groups("skewed", (3, 0, 5, 150, 1), tail=9),
    Groups("empty", (0, 0, 0), tail=12),
    Groups("one token", (0, 1)),
    Groups("all in one", (0, 300, 0), tail=1),
    Groups("many", (17,) * 9, tail=7),
    Groups("NaN and inf inside", (30, 0, 100), tail=5, has_special=True),
    Groups("no rows", (0, 0)),
)
