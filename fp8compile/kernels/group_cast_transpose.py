"""Kernel that reads groups of tokens once, and makes codes along rows and along tokens.

A Triton program quantizes a tile of 128 features and 128 tokens, padding between groups included, in both directions.
Rows after the last group get codes along rows only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.both_directions import CANDIDATES, TILE, _encode, _scales, constants
from fp8compile.kernels.group_amax_and_cast import _rows, _transposed, _units
from fp8compile.kernels.launch import Launch
from fp8compile.quantizers import CurrentScaling
from fp8compile.target import Target, target_of

__all__ = ["group_constants", "groups_both_directions", "groups_both_kernel"]


@triton.jit
def groups_both_kernel(
    x_ptr, offsets_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, E, C, stride_m, stride_k,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
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
    x = tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    row_amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, BLOCK)), 2)
    multiplier, scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
    codes = _encode(x * spread, R_MAX, R_E4M3, ROUNDS_ONCE)
    tl.store(rows_ptr + m * K + k, codes, is_inside)
    block = first_k // BLOCK + tl.arange(0, BLOCKS)[None, :]
    tl.store(row_scales_ptr + m + block * R, scale, is_row & (block * BLOCK < K))

    column_amax = tl.max(tl.reshape(tl.where(is_token, magnitude, 0), (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    encoded = _encode(x * spread, C_MAX, C_E4M3, ROUNDS_ONCE)
    at, column, turned, is_stored = _transposed(encoded, is_token, first, k, K, C, TILE)
    tl.store(columns_ptr + at * C + column, turned, is_stored)
    block = first // BLOCK + tl.arange(0, BLOCKS).to(tl.int64)[:, None]
    tl.store(column_scales_ptr + block * K + k, scale, (block * BLOCK < C) & (k < K))


def group_constants(rows: CurrentScaling, columns: CurrentScaling, align: int, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `groups_both_kernel`; groups start at multiples of ``align`` columns."""
    return {**constants(rows, columns, target), "ALIGN": align}


def groups_both_directions(
    x: Tensor,
    offsets: Tensor,
    rows: CurrentScaling,
    columns: CurrentScaling,
    align: int,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Launch:
    """Return the launch of the kernel that quantizes ``x``, (R, K), in groups of rows (tokens), in both directions.

    ``outputs`` are of this layout, n a divisor of 128:

        along rows      codes (R, K), scales (R, ceil(K / n)), column-major    blocks (1, n)
        along tokens    codes (K, C), scales (C / n, K)                        blocks (n, 1)

    Each group's columns begin at a multiple of ``align``, a divisor of 128 and a multiple of n; C counts the padding
    too.
    """
    (size, k), groups = x.shape, offsets.shape[0]
    names = ("rows_ptr", "row_scales_ptr", "columns_ptr", "column_scales_ptr")
    sizes = {"R": size, "K": k, "E": groups, "C": outputs[2].shape[1]}
    strides = {"stride_m": x.stride(0), "stride_k": x.stride(1)}
    pointers = {"x_ptr": x, "offsets_ptr": offsets, **dict(zip(names, outputs, strict=True))}
    return Launch(
        kernel=groups_both_kernel,
        # padded groups and the rows after them need at most this many columns, possibly more than the codes have
        grid=lambda _: (triton.cdiv(size + groups * (align - 1), TILE), triton.cdiv(k, TILE)),
        arguments=pointers | sizes | strides | group_constants(rows, columns, align, target_of(x.device)),
        writes=names,
        candidates=CANDIDATES,
    )
