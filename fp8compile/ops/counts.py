"""What kernels that quantize also count of their casts, for `fp8compile.Monitor`.

An op whose name ends in ``_counted`` launches the kernel of the op without that ending. It returns the same results,
and behind them ``counts``, int32 (directions, 3, programs): for each direction of the cast, and for each program of
the kernel, the numbers of `COUNTED`. Those of all programs add up to those of the tensor; the first, the bits of a
float32, is a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.formats import Float4Format, Float8Format, limit_of, magnitude_of_code
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import expand_blocks

__all__ = ["COUNTED", "counts_of", "counts_of_blocks", "counts_of_steps", "empty_counts", "pieces_of_counts"]

COUNTED = ("amax", "underflow", "saturation")  # totals of `fp8compile.ops.layer.statistics`

Format = Float8Format | Float4Format


def empty_counts(like: Tensor, directions: int, programs: int) -> Tensor:
    """Counts without values, for a kernel to write."""
    return like.new_empty((directions, len(COUNTED), programs), dtype=torch.int32)


def counts_of(values: Tensor, codes: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """The numbers of `COUNTED` of a cast, (3,) int32.

    Args:
        values: What was cast.
        codes: Their codes, one a byte.
        scale: The factor of each code, float32; it broadcasts against the values.
        fmt: Format of the codes.
    """
    magnitude = values.float().abs()
    amax = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    return torch.stack(
        (
            amax.view(torch.int32),
            (((codes & magnitude_of_code(fmt)) == 0) & (magnitude > 0)).sum(dtype=torch.int32),
            ((magnitude > scale * limit_of(fmt)) & (scale > 0)).sum(dtype=torch.int32),
        )
    )


def counts_of_blocks(values: Tensor, codes: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """`counts_of` a matrix with one code a byte, by the grid of its scales; those of two levels are multiplied."""
    scales = expand_blocks(quantizer.scale_values(scale), codes.shape, quantizer.block)
    return counts_of(values, codes, scales, quantizer.element_format())


def counts_of_steps(each: Sequence[Tensor], programs: int) -> Tensor:
    """Counts as a kernel leaves them, of what steps have counted in each direction: one program has them all."""
    found = torch.stack(list(each)).unsqueeze(-1)
    return torch.nn.functional.pad(found, (0, programs - 1)) if programs else found[..., :0]


def pieces_of_counts(counts: Tensor, name: str) -> Tensor:
    """The pieces of one number of `COUNTED`, (1, programs), of the counts of one direction, (3, programs)."""
    found = counts[COUNTED.index(name)].view(1, -1)
    return found.view(torch.float32) if name == "amax" else found
