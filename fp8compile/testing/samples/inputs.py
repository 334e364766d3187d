"""Sample inputs (matrices, groups of tokens, quantizers, recipes) for the tests of all ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile.quantizers import CurrentScaling, Quantizer, Recipe, TwoLevelScaling

__all__ = [
    "blockwise_of_16",
    "matrices",
    "offsets_of_groups",
    "quantizers",
    "recipes",
    "tokens",
    "two_level_quantizers",
]

# where groups end, as fractions of the rows; rows after the last group belong to none
ENDS = ((0.5, 0.9), (0.0, 0.1, 0.1, 1.0), (0.7,), (1.0, 1.0, 1.0), (0.0, 1.0), (0.0, 0.0))


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator).to(dtype)


def matrices() -> Iterator[Tensor]:
    """Yield tensors with 1 to 3 dims, in bfloat16, float32 or float16; permuted, strided, empty and one-row too."""
    yield _values(17, 24)
    yield _values(8, 40, dtype=torch.float32)
    yield _values(24, 17, dtype=torch.float16).t()
    yield _values(3, 5, 16).permute(1, 0, 2)
    yield _values(16, 64)[::2, ::2]
    yield _values(32)
    yield _values(1, 32)
    yield _values(0, 32)


def offsets_of_groups() -> Iterator[Tensor]:
    """Yield the ends of three groups of at most 12 rows: equal, skewed with rows left over, some or all empty."""
    for ends in ((4, 8, 12), (1, 1, 9), (0, 12, 12), (0, 0, 0)):
        yield torch.tensor(ends, dtype=torch.int32)


def tokens() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (matrix, ends of groups): skewed, empty and single groups; rows after the last group are NaN."""
    for x, ends in zip((x for x in matrices() if x.ndim == 2), ENDS, strict=True):
        offsets = torch.tensor([int(end * x.shape[0]) for end in ends], dtype=torch.int32)
        x[int(offsets[-1]) :] = torch.nan
        yield x, offsets


def quantizers() -> Iterator[Quantizer]:
    """Yield quantizers with one level of scales, of several blocks, formats, scale rules and roundings."""
    yield CurrentScaling()
    yield CurrentScaling(block=(1, -1), scale="pow2")
    yield CurrentScaling(block=(-1, 1), format="e5m2")
    yield CurrentScaling(block=(1, 16))
    yield CurrentScaling(block=(16, 16), eps=1e-6)
    yield CurrentScaling(block=(1, 32), scale="e8m0_rceil")
    yield CurrentScaling(block=(1, -1), format="e5m2", rounding="stochastic", seed=1)


def two_level_quantizers() -> Iterator[Quantizer]:
    """Yield two quantizers with two levels of scales, which differ in block, packing and scale rule."""
    yield TwoLevelScaling()
    yield TwoLevelScaling(block=(16, 16), packed="none", scale="torchao")


def blockwise_of_16(**options: Any) -> Recipe:
    """Make a blockwise recipe with blocks of 16, which no ready recipe has; ``options`` are of `CurrentScaling`."""
    line, tile, pillar = (CurrentScaling(block=block, **options) for block in ((1, 16), (16, 16), (16, 1)))
    return Recipe(
        input=line,
        weight=tile,
        grad_output=line,
        weight_for_grad_input=tile,
        grad_output_for_grad_weight=pillar,
        input_for_grad_weight=pillar,
    )


def recipes() -> Iterator[Recipe]:
    """Yield a tensorwise recipe, a rowwise recipe with grad_weight in high precision, and a blockwise recipe."""
    tensor, row, column = (CurrentScaling(block=block) for block in ((-1, -1), (1, -1), (-1, 1)))
    yield Recipe(
        input=tensor,
        weight=tensor,
        grad_output=CurrentScaling(format="e5m2"),
        weight_for_grad_input=tensor,
        grad_output_for_grad_weight=CurrentScaling(format="e5m2"),
        input_for_grad_weight=tensor,
    )
    yield Recipe(input=row, weight=row, grad_output=row, weight_for_grad_input=column)
    yield blockwise_of_16()
