"""Kernel that reads groups of tokens once, and makes codes along rows and along tokens.

A Triton program quantizes a tile of 128 features and 128 tokens, padding between groups included, in both directions.
Rows after the last group get codes along rows only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.inductor import TileKernel, TileLaunch, with_counts
from fp8compile.kernels.both_directions import TILE, WARPS, _encode, _scales, _value_of_scale, constants
from fp8compile.kernels.group_amax_and_cast import _count_units, _rows, _transposed, _units
from fp8compile.kernels.values import values, write
from fp8compile.quantizers import CurrentScaling

__all__ = ["GROUPS_BOTH", "WARPS", "group_constants", "groups_both_directions", "groups_both_kernel"]


@triton.jit
def groups_both_kernel(
    x_ptr, offsets_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, E, C, stride_m, stride_k,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize one tile of ``x``, (R, K), along rows and, to transposed codes (K, C), along tokens.

    C is the number of columns after padding each group to a multiple of ALIGN. BLOCK is the blocks' length; constants
    R_* and C_* describe the quantizers along rows and along tokens.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    UNITS: tl.constexpr = TILE // ALIGN
    first, first_k = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64) * TILE
    k = first_k + tl.arange(0, TILE)[None, :]
    group, row, end = _units(offsets_ptr, first, E, ALIGN, UNITS)
    is_group = group < E
    m, is_row = _rows(row, tl.where(is_group, end, R), R, ALIGN, TILE)
    is_token = is_row & tl.reshape(tl.broadcast_to(is_group[:, None], (UNITS, ALIGN)), (TILE, 1))
    is_inside = is_row & (k < K)
    x = values(x_ptr, m, k, is_inside, stride_m, stride_k)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    row_amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, BLOCK)), 2)
    multiplier, scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
    codes = _encode(x * spread, R_MAX, R_E4M3)
    write(rows_ptr, m, k, codes, is_inside, K)
    if counts_ptr is not None:
        scales = tl.broadcast_to(_value_of_scale(scale, R_RULE)[:, :, None], (TILE, BLOCKS, BLOCK))
        scales = tl.reshape(scales, (TILE, TILE))
        _count_units(counts_ptr, 0, group, E, magnitude, codes, scales, is_token, UNITS, R_E4M3)
    block = first_k // BLOCK + tl.arange(0, BLOCKS)[None, :]
    tl.store(row_scales_ptr + m + block * R, scale, is_row & (block * BLOCK < K))

    column_amax = tl.max(tl.reshape(tl.where(is_token, magnitude, 0), (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    encoded = _encode(x * spread, C_MAX, C_E4M3)
    if counts_ptr is not None:
        scales = tl.broadcast_to(_value_of_scale(scale, C_RULE)[:, None, :], (BLOCKS, BLOCK, TILE))
        scales = tl.reshape(scales, (TILE, TILE))
        _count_units(counts_ptr, 1, group, E, magnitude, encoded, scales, is_token, UNITS, C_E4M3)
    at, column, turned, is_stored = _transposed(encoded, is_token, first, k, K, C, TILE)
    tl.store(columns_ptr + at * C + column, turned, is_stored)
    block = first // BLOCK + tl.arange(0, BLOCKS).to(tl.int64)[:, None]
    tl.store(column_scales_ptr + block * K + k, scale, (block * BLOCK < C) & (k < K))


GROUPS_BOTH = TileKernel(
    groups_both_kernel,
    inputs=("offsets_ptr",),
    outputs=("row_scales_ptr", "columns_ptr", "column_scales_ptr"),
    sizes=("R", "K", "E", "C"),
)


GROUPS_BOTH_COUNTED = with_counts(GROUPS_BOTH)


def group_constants(rows: CurrentScaling, columns: CurrentScaling, align: int) -> dict[str, object]:
    """Return the compile-time constants of `groups_both_kernel`; groups start at multiples of ``align`` columns."""
    return {**constants(rows, columns), "ALIGN": align}


def groups_both_directions(
    x: Tensor,
    offsets: Tensor,
    length: int,
    rows: CurrentScaling,
    columns: CurrentScaling,
    align: int,
    *,
    counts: bool = False,
) -> TileLaunch:
    """Return the launch of the kernel that quantizes ``x``, (R, K), in groups of rows (tokens), in both directions.

    Call it with ``x``, ``offsets`` and four contiguous outputs, n a divisor of 128:

        along rows      codes (R, K), scales (ceil(K / n), R)    blocks (1, n)
        along tokens    codes (K, C), scales (C / n, K)          blocks (n, 1)

    Each group's columns begin at a multiple of ``align``, a divisor of 128 and a multiple of n; C = ``length`` counts
    the padding too. With ``counts``, a fifth output, zeros before the launch, receives the groups' statistics
    (`fp8compile.ops.counting_kernels`).
    """
    (size, k), groups = x.shape, offsets.shape[0]
    # padded groups and the rows after them need at most this many columns, possibly more than the codes have
    grid = (triton.cdiv(size + groups * (align - 1), TILE), triton.cdiv(k, TILE), 1)
    sizes = {"R": size, "K": k, "E": groups, "C": length}
    kernel = GROUPS_BOTH_COUNTED if counts else GROUPS_BOTH
    return TileLaunch(kernel, grid, sizes, group_constants(rows, columns, align), WARPS)
