"""Statistics (amax, underflows, saturations) that casting kernels also compute, for a Monitor.

An op whose name ends in ``_counted`` launches the same kernel as the op without that ending. It returns the same
results, then ``counts``, int32 (directions, 3, programs): the three statistics from each Triton program. Directions
are codes along rows and codes along columns, or the one that the kernel makes. The amax is stored as float32 bits. The
tensor's amax is the maximum over programs; underflows and saturations are sums. Programs are sorted by stacked matrix.

Kernels of groups accumulate per group instead: ``counts`` is int64 (directions, 3, E) for E groups.
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
    """Make an uninitialized tensor for a kernel's statistics, int32 (directions, 3, Triton programs).

    ``directions`` is 2 for codes along rows and along columns, else 1; ``like`` gives the device.
    """
    return like.new_empty((directions, len(COUNTED), programs), dtype=torch.int32)


def counts_of(values: Tensor, codes: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Compute the amax (as bits), underflows and saturations of one cast of ``values``, (3,) int32.

    ``codes`` has one code per byte. ``scale``, float32, multiplies the codes; it broadcasts against ``values``.
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
    """Compute `counts_of` for a matrix with one code per byte; ``scale`` has one entry for each block."""
    scales = expand_blocks(quantizer.scale_values(scale), codes.shape, quantizer.block)
    return counts_of(values, codes, scales, quantizer.element_format())


def counts_of_steps(each: Sequence[Tensor], programs: int) -> Tensor:
    """Arrange the results of `counts_of`, one for each direction, as a kernel's statistics: (directions, 3, programs).

    The first program gets the results, the others get zeros.
    """
    found = torch.stack(list(each)).unsqueeze(-1)
    return torch.nn.functional.pad(found, (0, programs - 1)) if programs else found[..., :0]


def no_counts_of_groups(offsets: Tensor, directions: int) -> Tensor:
    """Make zero statistics of E groups, int64 (directions, 3, E), for a kernel to add to.

    ``offsets``, (E,), are the ends of the groups; ``directions`` is 2 for codes along rows and along tokens, else 1.
    """
    return offsets.new_zeros((directions, len(COUNTED), offsets.shape[0]), dtype=torch.int64)


def counts_of_groups(
    x: Tensor, offsets: Tensor, quantizers: Sequence[Quantizer], multipliers: Tensor | None = None
) -> Tensor:
    """Compute a kernel's statistics of E groups in PyTorch, int64 (quantizers, 3, E), by casting each group.

    ``offsets`` are the ends of the E groups of rows of ``x``. ``multipliers`` (1 / scale) has a row for each group;
    None to compute multipliers from the rows.
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
    """Return one statistic, (matrices, partial values), by its ``name`` in `COUNTED`.

    ``counts`` is (3, programs), or (3, E) for groups; ``matrices`` is the number of stacked matrices or groups, or 1.
    """
    found = counts[COUNTED.index(name)].view(matrices, -1)
    if name != "amax":
        return found
    return (found if found.dtype == torch.int32 else found.int()).view(torch.float32)
