"""One read of tokens in groups: their codes along rows, and the amax of each column of each group.

A program has some rows, one batch after the other, and keeps the largest of each column on the way; where a group
ends, it hands them over. The rest is that of `fp8compile.kernels.weights` and `fp8compile.kernels.groups`.

This module needs Triton; `fp8compile.ops.groups.group_quantize_rows` imports it when a GPU asks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.groups import _groups_ended
from fp8compile.kernels.weights import PROGRAMS, ROW_WARPS, _quantized_rows, row_constants
from fp8compile.quantizers import CurrentScaling

__all__ = ["group_row_constants", "group_rows_kernel", "rows_of_groups"]

BATCH = 8192  # values at once: 16 a thread


@triton.jit
def group_rows_kernel(
    x_ptr, offsets_ptr, codes_ptr, scales_ptr, amax_ptr, R, K, E, ROWS, stride_m, stride_k,
    WIDTH: tl.constexpr, BATCH: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows, group by group; those behind the last group are the last, and in no amax."""
    k = tl.arange(0, WIDTH)[None, :]
    first = tl.program_id(0) * ROWS
    last = tl.minimum(first + ROWS, R)
    for group in range(_groups_ended(offsets_ptr, first, E), _groups_ended(offsets_ptr, last - 1, E) + 1):
        start = tl.maximum(first, tl.load(offsets_ptr + group - 1, group > 0, other=0))
        end = tl.minimum(last, tl.load(offsets_ptr + group, group < E, other=R))
        largest = tl.zeros((1, WIDTH), tl.int32)
        for row in range(start, end, BATCH):
            m = (row + tl.arange(0, BATCH)).to(tl.int64)
            of_rows = _quantized_rows(
                x_ptr, codes_ptr, scales_ptr, m, m < end, k, K, stride_m, stride_k,
                R_MAX, R_EXPONENT, R_E4M3, R_RULE, R_EPS,
            )  # fmt: skip
            largest = tl.maximum(largest, of_rows)
        tl.atomic_max(amax_ptr + group * K + k, largest, (k < K) & (group < E) & (start < end), sem="relaxed")


def group_row_constants(quantizer: CurrentScaling, k: int) -> dict[str, object]:
    """What the kernel is compiled for."""
    constants = row_constants(quantizer, k)
    return {**constants, "BATCH": max(1, BATCH // constants["WIDTH"])}


def rows_of_groups(
    x: Tensor, offsets: Tensor, quantizer: CurrentScaling, codes: Tensor, scale: Tensor, amax: Tensor
) -> None:
    """Codes and scales of rows, and the amax of each column of each group.

    Args:
        x: (R, K), any strides, float32, bfloat16 or float16; neither is 0.
        offsets: (E,), contiguous, int32.
        quantizer: Block (1, -1).
        codes: (R, K), contiguous, uint8.
        scale: (R, 1), contiguous.
        amax: (E, K), contiguous, float32, zeros.
    """
    (size, k), groups = x.shape, offsets.shape[0]
    rows = triton.cdiv(size, PROGRAMS)
    grid, bits = (triton.cdiv(size, rows),), amax.view(torch.int32)
    group_rows_kernel[grid](
        x, offsets, codes, scale, bits, size, k, groups, rows, *x.stride(), **group_row_constants(quantizer, k),
        num_warps=ROW_WARPS,
    )  # fmt: skip
