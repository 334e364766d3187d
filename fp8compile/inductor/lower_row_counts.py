"""Inductor IR that counts two things of each row in the halves of one number, by one reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["lower_counts_of_rows"]


def lower_counts_of_rows(magnitude: Any, codes: Any, limit: Any, mask: int, dtype: torch.dtype, shift: int) -> Any:
    """Lower the counts of `fp8compile.ops.count_cast`.

    Args:
        magnitude: Inductor IR of magnitudes, (..., n) float32.
        codes: Their codes, (..., n) uint8.
        limit: The largest magnitude that does not saturate; it broadcasts against the magnitudes.
        mask: The bits of a code without its sign.
        dtype: Integer dtype of the numbers.
        shift: Number of bits in a half.

    Returns:
        A number for each row: codes of 0 for other values in its lower half, magnitudes beyond the limit in its upper.
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
