"""Kernel that reads groups of rows once: quantizes each row, and computes each column's amax in each group.

A Triton program quantizes its rows in batches, and keeps the largest magnitude of each column in registers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.inductor import TileKernel, TileLaunch, with_counts
from fp8compile.kernels.both_directions import LIMIT_E4M3, LIMIT_E5M2, _scales, _value_of_scale
from fp8compile.kernels.counts import add_counts, is_beyond, is_underflow
from fp8compile.kernels.group_amax_and_cast import _groups_ended
from fp8compile.kernels.programs import PROGRAMS
from fp8compile.kernels.quantize_weight import ROW_WARPS, _quantized_rows, row_constants
from fp8compile.kernels.values import values, write
from fp8compile.quantizers import CurrentScaling

__all__ = ["GROUP_ROWS", "group_row_constants", "group_rows_kernel", "rows_of_groups"]

BATCH = 8192  # number of values in a batch of rows: 16 for each thread


@triton.jit
def _counts_of_rows(
    x, codes,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
):  # fmt: skip
    """Count underflows and saturations in each column of rows ``x``; return two int32 tensors (1, columns)."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    _, scale = _scales(tl.max(magnitude, 1)[:, None], R_MAX, R_EXPONENT, R_RULE, R_EPS)
    beyond = is_beyond(magnitude, _value_of_scale(scale, R_RULE), LIMIT_E4M3 if R_E4M3 else LIMIT_E5M2)
    underflow = is_underflow(magnitude, codes, 0x7F)
    return tl.sum(underflow.to(tl.int32), 0)[None, :], tl.sum(beyond.to(tl.int32), 0)[None, :]


@triton.jit
def group_rows_kernel(
    x_ptr, offsets_ptr, codes_ptr, scales_ptr, amax_ptr, R, K, E, ROWS, stride_m, stride_k,
    WIDTH: tl.constexpr, BATCH: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize ROWS whole rows of ``x``, (R, K), and update each column's amax in the groups of these rows.

    Rows after the last group change no amax. Each batch has BATCH rows; WIDTH is K rounded up to a power of two.
    """
    k = tl.arange(0, WIDTH)[None, :]
    first = tl.program_id(0) * ROWS
    last = tl.minimum(first + ROWS, R)
    for group in range(_groups_ended(offsets_ptr, first, E), _groups_ended(offsets_ptr, last - 1, E) + 1):
        start = tl.maximum(first, tl.load(offsets_ptr + group - 1, group > 0, other=0))
        end = tl.minimum(last, tl.load(offsets_ptr + group, group < E, other=R))
        largest = tl.zeros((1, WIDTH), tl.int32)
        if counts_ptr is not None:
            underflow, beyond = tl.zeros((1, WIDTH), tl.int32), tl.zeros((1, WIDTH), tl.int32)
        for row in range(start, end, BATCH):
            m = (row + tl.arange(0, BATCH)[:, None]).to(tl.int64)
            is_inside = (m < end) & (k < K)
            x = values(x_ptr, m, k, is_inside, stride_m, stride_k)
            codes, of_rows = _quantized_rows(x, scales_ptr, m, m < end, R_MAX, R_EXPONENT, R_E4M3, R_RULE, R_EPS)
            write(codes_ptr, m, k, codes, is_inside, K)
            largest = tl.maximum(largest, of_rows)
            if counts_ptr is not None:
                own = _counts_of_rows(x, codes, R_MAX, R_EXPONENT, R_E4M3, R_RULE, R_EPS)
                underflow, beyond = underflow + own[0], beyond + own[1]
        bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)  # nonnegative floats order like their bits
        tl.atomic_max(bits_ptr + group * K + k, largest, (k < K) & (group < E) & (start < end), sem="relaxed")
        if counts_ptr is not None:
            add_counts(counts_ptr, 0, group, E, tl.max(largest), tl.sum(underflow), tl.sum(beyond), group < E)


def group_row_constants(quantizer: CurrentScaling, k: int) -> dict[str, object]:
    """Return the compile-time constants of `group_rows_kernel` for rows of ``k`` elements."""
    constants: dict[str, Any] = row_constants(quantizer, k)
    return {**constants, "BATCH": max(1, BATCH // constants["WIDTH"])}


GROUP_ROWS = TileKernel(
    group_rows_kernel,
    inputs=("offsets_ptr",),
    outputs=("scales_ptr", "amax_ptr"),
    sizes=("R", "K", "E", "ROWS"),
    tile=("BATCH", "WIDTH"),
    added_to=("amax_ptr",),
)


GROUP_ROWS_COUNTED = with_counts(GROUP_ROWS)


def rows_of_groups(x: Tensor, offsets: Tensor, quantizer: CurrentScaling, *, counts: bool = False) -> TileLaunch:
    """Return the launch of `group_rows_kernel`; call it with ``x``, ``offsets`` and three contiguous outputs.

    ``x`` is (R, K), with any strides and no size 0, in E groups of rows; the quantizer's block is (1, -1). The outputs
    are codes (R, K) uint8, their scales (R, 1), and each group's amax in each column, (E, K) float32. With
    ``counts``, a fourth output receives the groups' statistics (`fp8compile.ops.counting_kernels`). Amaxes and
    statistics must be zeros before the launch.
    """
    (size, k), groups = x.shape, offsets.shape[0]
    rows = triton.cdiv(size, PROGRAMS)
    sizes = {"R": size, "K": k, "E": groups, "ROWS": rows}
    kernel = GROUP_ROWS_COUNTED if counts else GROUP_ROWS
    return TileLaunch(kernel, (triton.cdiv(size, rows), 1, 1), sizes, group_row_constants(quantizer, k), ROW_WARPS)
