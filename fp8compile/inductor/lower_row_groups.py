"""Inductor IR that stores a matrix and finds the largest magnitude of weighted sums of its rows, reading a row once.

Groups of consecutive rows are summed column by column, with a factor for each row (a Hadamard transform). The
magnitude is the largest of all sums. As PyTorch operators, the sums would be several kernels, and each would read the
rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8compile._compat import concatenated_buffers

__all__ = ["Factors", "lower_largest_of_sums"]

Factors = tuple[tuple[float, ...], ...] | None
MAGNITUDE = 0x7FFFFFFF


def _is_made_by_inductor(x: Any) -> bool:
    """Whether the matrix (Inductor IR) is not in memory yet, so that each reader would compute it again."""
    from torch._inductor import ir

    while isinstance(x, (ir.TensorBox, ir.BaseView)):
        x = x.data
    return isinstance(x, ir.StorageBox) and isinstance(x.data, ir.Pointwise)


def _laid_down(x: Any, rows: int) -> tuple[Any, list[Callable[..., Any]]]:
    """Store the matrix (Inductor IR) unless it is stored already; return the stored matrix and loaders.

    There is one loader, a function of (group, column), for each of a group's ``rows`` rows.
    """
    from torch._inductor import ir, lowering

    m, k = x.get_size()
    load = x.make_loader()
    of_row = [lambda index, i=i: load([index[0] * rows + i, index[-1]]) for i in range(rows)]
    if not _is_made_by_inductor(x):
        return ir.ExternKernel.require_contiguous(x), of_row
    parts = []
    for each in of_row:  # the kernel that reads these rows also stores them at their place in the matrix
        part = ir.Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=each, ranges=[m // rows, 1, k])
        part.realize()
        parts.append(part)
    whole = lowering.view(concatenated_buffers(parts, 1), [m, k])
    stored = [part.make_loader() for part in parts]
    return whole, [lambda index, each=each: each([index[0], 0, index[-1]]) for each in stored]


def _sums(values: Sequence[Any], factors: Factors) -> list[Any]:
    from torch._inductor.virtualized import ops

    if factors is None:
        return list(values)
    sums = []
    for line in factors:
        total = None
        for value, factor in zip(values, line, strict=True):
            term = ops.mul(value, ops.constant(factor, torch.float32))
            total = term if total is None else ops.add(total, term)
        sums.append(total)
    return sums


def lower_largest_of_sums(x: Any, rows: int, kinds: Sequence[Factors]) -> tuple[Any, list[Any]]:
    """Store a matrix, and find the largest magnitudes of weighted sums over groups of its rows.

    Args:
        x: Inductor IR of a matrix (M, K), M a multiple of ``rows``.
        rows: Number of consecutive rows in a group.
        kinds: For each magnitude, the sums of which it is the largest; None for the rows themselves. A sum is given by
            its factors, one for each row of a group; the products are added in this order in float32.

    Returns:
        The matrix, and for each of ``kinds`` the largest magnitude, (1,) float32, NaN if a sum is NaN. If the matrix
        was not stored yet, the kernel of the reduction stores it.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    m, k = x.get_size()
    whole, loaders = _laid_down(x, rows)

    def largest(factors: Factors) -> Any:
        def inner(index: Sequence[Any], reduced: Sequence[Any]) -> Any:
            values = [ops.to_dtype(load([*index, *reduced]), torch.float32) for load in loaders]
            top = None
            for each in _sums(values, factors):
                bits = ops.to_dtype_bitcast(each, torch.int32, torch.float32)
                magnitude = ops.bitwise_and(bits, ops.constant(MAGNITUDE, torch.int32))
                top = magnitude if top is None else ops.maximum(top, magnitude)
            return top

        of_groups = ir.Reduction.create(
            device=x.get_device(),
            dst_dtype=torch.int32,
            src_dtype=torch.int32,
            inner_fn=inner,
            ranges=[m // rows],
            reduction_ranges=[k],
            reduction_type="max",
            reduction_hint=ir.ReductionHint.INNER,
        )
        of_groups.realize()
        found = lowering.make_reduction("max")(of_groups, axis=0, keepdims=True)
        return lowering.lowerings[torch.ops.aten.view.dtype](found, torch.float32)

    return whole, [largest(factors) for factors in kinds]
