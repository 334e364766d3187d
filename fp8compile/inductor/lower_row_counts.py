"""Inductor lowering of `count_cast`: two counts of each row, in one integer, by one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["lower_counts_of_rows"]


def lower_counts_of_rows(magnitude: Any, codes: Any, limit: Any, mask: int, dtype: torch.dtype, shift: int) -> Any:
    """Lower `fp8compile.ops.count_cast`'s two counts of each row: underflows and saturations.

    Args:
        magnitude: Inductor IR of magnitudes, (..., n) float32.
        codes: Inductor IR of the values' codes, (..., n) uint8.
        limit: The largest magnitude that does not saturate; it broadcasts against the magnitudes.
        mask: Bit mask of a code's magnitude, without its sign bit.
        dtype: Integer dtype of the result.
        shift: Number of bits in a half of ``dtype``.

    Returns:
        An integer for each row: number of nonzero values with code 0 (lower half), of values above the limit (upper).
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    sizes = magnitude.get_size()
    loaders = [each.make_loader() for each in (magnitude, codes, lowering.expand(limit, sizes))]

    def inner(index: Sequence[Any]) -> Any:
        own_magnitude, code, most = (load(index) for load in loaders)
        is_zero = ops.eq(ops.bitwise_and(code, ops.constant(mask, torch.uint8)), ops.constant(0, torch.uint8))
        underflow = ops.logical_and(is_zero, ops.gt(own_magnitude, ops.constant(0.0, torch.float32)))
        beyond = ops.gt(own_magnitude, most)
        nothing = ops.constant(0, dtype)
        of_underflow = ops.where(underflow, ops.constant(1, dtype), nothing)
        return ops.add(of_underflow, ops.where(beyond, ops.constant(1 << shift, dtype), nothing))

    both = ir.Pointwise.create(device=magnitude.get_device(), dtype=dtype, inner_fn=inner, ranges=sizes)
    return lowering.lowerings[torch.ops.aten.sum.dim_IntList](both, [-1], dtype=dtype)
