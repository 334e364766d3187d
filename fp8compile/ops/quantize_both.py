"""fp8compile::quantize_both: codes and scales of a matrix along rows and along columns, from one read of it.

A gradient is multiplied along its rows for grad_input and along its columns for grad_weight. With blocks along each,
the two casts have nothing in common but their input, and Inductor reads that twice for each. On a GPU this op is one
Triton kernel that reads it once; on a CPU, and as the reference, it is the two casts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops import samples
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.registry import register_op
from fp8compile.ops.scale import scale
from fp8compile.ops.sharding import Cut, Split
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.target import target_of

__all__ = ["empty_outputs", "is_pair", "quantize_both", "two_casts"]

LARGEST_BLOCK = 128


def is_pair(rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether the kernel makes codes of these two: current scaling to the nearest code, blocks (1, n) and (n, 1).

    n divides 128.
    """
    if type(rows) is not CurrentScaling or type(columns) is not CurrentScaling:
        return False
    if rows.rounding != "nearest" or columns.rounding != "nearest":
        return False
    n = rows.block[1]
    return rows.block == (1, n) and columns.block == (n, 1) and n > 1 and LARGEST_BLOCK % n == 0


def empty_outputs(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results in the layouts of the GEMMs: scales of rows down the rows, codes of columns column by column."""
    (m, k), row_blocks = x.shape, rows.scale_shape(x.shape)[1]
    return (
        x.new_empty((m, k), dtype=torch.uint8),
        x.new_empty((row_blocks, m), dtype=rows.scale_dtype()).t(),
        x.new_empty((k, m), dtype=torch.uint8).t(),
        x.new_empty(columns.scale_shape(x.shape), dtype=columns.scale_dtype()),
    )


def two_casts(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference: one cast after the other, in the layouts of `empty_outputs`."""
    row_multiplier, row_scale = scale(amax(x, rows), rows)
    column_multiplier, column_scale = scale(amax(x, columns), columns)
    return (
        cast(x, row_multiplier, rows),
        row_scale.t().contiguous().t(),
        cast(x, column_multiplier, columns).t().contiguous().t(),
        column_scale,
    )


def _kernel(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if target_of(x.device).type == "cpu":
        return two_casts(x, rows, columns)
    outputs = empty_outputs(x, rows, columns)
    if not _compat.guard_or_false(x.numel() == 0):
        from fp8compile.kernels.both_directions import both_directions

        codes, scale, column_codes, column_scale = outputs
        both_directions(x.contiguous(), rows, columns, (codes, scale.t(), column_codes.t(), column_scale))
    return outputs


def _decompose(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if target_of(x.device).type != "cpu":
        return NotImplemented  # stays one call, of the kernel
    return two_casts(x, rows, columns)


def _sharding(x: Tensor, rows: Quantizer, columns: Quantizer) -> list[Split]:
    return [Split((Cut(dim, rows.block[1]), None, None), (dim, dim, dim, dim)) for dim in (0, 1)]


def _samples() -> Iterator[tuple]:
    pairs = [
        (CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")),
        (
            CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
            CurrentScaling(block=(32, 1), scale="e8m0_floor", format="e5m2"),
        ),
    ]
    for x in samples.matrices():
        if x.ndim == 2:
            for rows, columns in pairs:
                yield x, rows, columns


quantize_both = register_op(
    "fp8compile::quantize_both",
    _kernel,
    fake=empty_outputs,
    backward=None,
    decompose=_decompose,
    sharding=_sharding,
    samples=_samples,
)
_compat.register_fallback(quantize_both)
