"""Kernel that reads groups of rows once: quantizes each row, and computes each column's amax in each group.

A Triton program quantizes its rows in batches, and keeps the largest magnitudes of columns in registers. A thread has
16 values of each half of a row, so a row of at most 1024 values is in one warp, and one of 2048 values in two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.kernels.both_directions import _bits, _encode, _of_direction, _scales
from fp8compile.kernels.group_amax_and_cast import _groups_ended
from fp8compile.kernels.launch import Candidates, Launch
from fp8compile.kernels.programs import PROGRAMS
from fp8compile.quantizers import CurrentScaling
from fp8compile.target import Target, target_of

__all__ = ["candidates", "group_row_constants", "group_rows_kernel", "rows_of_groups"]

WARPS = 4  # of a row of at most 4096 values; four programs then fit on a multiprocessor of an H200
PIECE_OF_WARP = 512  # 16 values, or 16 bytes of codes, for each thread


@triton.jit
def group_rows_kernel(
    x_ptr, offsets_ptr, codes_ptr, scales_ptr, amax_ptr, R, K, E, ROWS, stride_m, stride_k,
    PIECES: tl.constexpr, PIECE: tl.constexpr, BATCH: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS whole rows of ``x``, (R, K), and update each column's amax in the groups of these rows.

    Rows after the last group change no amax; without offsets, all rows are one group. Each batch has BATCH rows, of
    PIECES / BATCH pieces of PIECE values. On an H200 a batch of bfloat16 rows needs 0.33 issue cycles for each cycle
    of its memory traffic.
    """
    OF_ROW: tl.constexpr = PIECES // BATCH
    piece = tl.arange(0, PIECES)[:, None]
    k = piece // BATCH * PIECE + tl.arange(0, PIECE)[None, :]
    first = tl.program_id(0) * ROWS
    last = tl.minimum(first + ROWS, R)
    first_group, last_group = 0, 0
    if offsets_ptr is not None:
        first_group, last_group = _groups_ended(offsets_ptr, first, E), _groups_ended(offsets_ptr, last - 1, E)
    for group in range(first_group, last_group + 1):
        start, end = first, last
        if offsets_ptr is not None:
            start = tl.maximum(first, tl.load(offsets_ptr + group - 1, group > 0, other=0))
            end = tl.minimum(last, tl.load(offsets_ptr + group, group < E, other=R))
        largest = tl.zeros((PIECES, PIECE), tl.int32)
        for row in range(start, end, BATCH):
            m = (row + piece % BATCH).to(tl.int64)
            is_inside = (m < end) & (k < K)
            x = tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _bits(x))
            amax = tl.max(tl.max(tl.reshape(_bits(x), (OF_ROW, BATCH, PIECE)), 0), 1)
            multiplier, scale = _scales(amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
            of_batch = (row + tl.arange(0, BATCH)).to(tl.int64)
            tl.store(scales_ptr + of_batch, scale, of_batch < end)
            spread = tl.broadcast_to(multiplier[None, :, None], (OF_ROW, BATCH, PIECE))
            codes = _encode(x * tl.reshape(spread, (PIECES, PIECE)), R_MAX, R_E4M3, ROUNDS_ONCE)
            tl.store(codes_ptr + m * K + k, codes, is_inside)
        of_column = tl.max(tl.reshape(largest, (OF_ROW, BATCH, PIECE)), 1)
        column = tl.arange(0, OF_ROW)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)  # nonnegative floats order like their bits
        is_column = (column < K) & (group < E) & (start < end)
        tl.atomic_max(bits_ptr + group * K + column, of_column, is_column, sem="relaxed")


def candidates(k: int) -> Candidates:
    """Return the numbers of warps of `group_rows_kernel` for rows of ``k`` elements."""
    warps = max(WARPS, triton.next_power_of_2(k) // (2 * PIECE_OF_WARP))
    return Config({}, num_warps=warps), Config({}, num_warps=2 * warps)


def group_row_constants(quantizer: CurrentScaling, k: int, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `group_rows_kernel` for rows of ``k`` elements."""
    width = max(2, triton.next_power_of_2(k))
    batch = max(1, candidates(k)[0].num_warps * PIECE_OF_WARP * 2 // width)
    sizes = {"PIECES": batch * 2, "PIECE": width // 2, "BATCH": batch}
    return sizes | _of_direction("R", quantizer, target)


def rows_of_groups(
    x: Tensor, offsets: Tensor | None, quantizer: CurrentScaling, outputs: tuple[Tensor, Tensor, Tensor]
) -> Launch:
    """Return the launch of `group_rows_kernel`, which quantizes rows and computes amaxes of columns.

    ``x`` is (R, K), with any strides and no size 0, in E groups of rows that end at ``offsets``, or in one group; the
    quantizer's block is (1, -1). The outputs, contiguous, are codes (R, K) uint8, their scales (R, 1), and each
    group's amax in each column, (E, K) float32.
    """
    (size, k), groups = x.shape, 1 if offsets is None else offsets.shape[0]
    rows = torch.sym_max(1, triton.cdiv(size, PROGRAMS))  # a grid of 0 programs without rows
    names = ("codes_ptr", "scales_ptr", "amax_ptr")
    sizes = {"R": size, "K": k, "E": groups, "ROWS": rows, "stride_m": x.stride(0), "stride_k": x.stride(1)}
    pointers = {"x_ptr": x, "offsets_ptr": offsets, **dict(zip(names, outputs, strict=True))}
    return Launch(
        kernel=group_rows_kernel,
        grid=lambda _: (triton.cdiv(size, rows),),
        arguments=pointers | sizes | group_row_constants(quantizer, k, target_of(x.device)),
        writes=names,
        zeroed=("amax_ptr",),
        candidates=candidates(k),
    )
