"""What kernels that quantize also count of their casts, for `fp8compile.Monitor`.

An op whose name ends in ``_counted`` launches the kernel of the op without that ending. It returns the same results,
and behind them ``counts``, int32 (directions, 3, programs): for each direction of the cast, and for each program of
the kernel, the numbers of `COUNTED`. Those of all programs add up to those of the tensor; the first, the bits of a
float32, is a maximum. Programs of a stack are sorted by matrix.

Kernels of groups add to the numbers of each group: ``counts`` are int64 (directions, 3, E).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.formats import Float4Format, Float8Format, limit_of, magnitude_of_code
from fp8compile.ops.groups.padding import spans
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import expand_blocks

__all__ = [
    "COUNTED",
    "counts_of",
    "counts_of_blocks",
    "counts_of_groups",
    "counts_of_steps",
    "empty_counts",
    "no_counts_of_groups",
    "pieces_of_counts",
]

COUNTED = ("amax", "underflow", "saturation")  # totals of `fp8compile.ops.layer.statistics.definitions`

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


def no_counts_of_groups(offsets: Tensor, directions: int) -> Tensor:
    """Counts of groups before anything is counted, for a kernel to add to."""
    return offsets.new_zeros((directions, len(COUNTED), offsets.shape[0]), dtype=torch.int64)


def counts_of_groups(
    x: Tensor, offsets: Tensor, quantizers: Sequence[Quantizer], multipliers: Tensor | None = None
) -> Tensor:
    """Counts as a kernel of groups leaves them, of rows that each quantizer casts group by group.

    ``multipliers``, a row for each group, are known already; None to compute them.
    """
    counts = no_counts_of_groups(offsets, len(quantizers))
    for direction, quantizer in enumerate(quantizers):
        for group, (rows, _) in enumerate(spans(offsets, 1)):
            own = x[rows]
            if multipliers is None:
                multiplier, scale = PYTHON_OF_STEPS.scale(PYTHON_OF_STEPS.amax(own, quantizer), quantizer)
            else:
                multiplier = multipliers[group : group + 1]
                scale = quantizer.scale_of(multiplier)
            codes = PYTHON_OF_STEPS.cast(own, multiplier, quantizer)
            counts[direction, :, group] = counts_of_blocks(own, codes, scale, quantizer)
    return counts


def pieces_of_counts(counts: Tensor, name: str, matrices: int) -> Tensor:
    """The pieces of one number of `COUNTED`, (matrices, pieces), of the counts of one direction.

    ``matrices`` is the number of matrices of a stack, or of groups; 1 without.
    """
    found = counts[COUNTED.index(name)].view(matrices, -1)
    if name != "amax":
        return found
    return (found if found.dtype == torch.int32 else found.int()).view(torch.float32)
