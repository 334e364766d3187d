"""One read of tokens in groups, their codes along rows and along tokens: a tile of 128 x 128 a program.

    128 columns of codes --rows that they hold--> tile --amax of each row's blocks--> codes (R, K), scales
                                                   |
                                                   +----amax of blocks of tokens----> codes written as (K, C), scales

Columns behind the last group hold the rows behind it, which have codes along rows and none along tokens. The rest is
that of `fp8compile.kernels.groups` and `fp8compile.kernels.both_directions`.

This module needs Triton; `fp8compile.ops.groups.group_quantize_both` imports it when a GPU asks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.both_directions import TILE, WARPS, _encode, _scales, constants
from fp8compile.kernels.groups import _store_transposed, _tokens, _units
from fp8compile.quantizers import CurrentScaling

__all__ = ["WARPS", "group_constants", "groups_both_directions", "groups_both_kernel"]


@triton.jit
def groups_both_kernel(
    x_ptr, offsets_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, E, C, stride_m, stride_k,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
):  # fmt: skip
    """One tile of columns of codes; columns that hold no row are zeros, which never are the largest."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    UNITS: tl.constexpr = TILE // ALIGN
    first, first_k = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64) * TILE
    k = first_k + tl.arange(0, TILE)
    group, row, end = _units(offsets_ptr, first, E, ALIGN, UNITS)
    is_group = group < E
    x, is_row = _tokens(x_ptr, row, tl.where(is_group, end, R), k, R, K, stride_m, stride_k, ALIGN, TILE)
    is_token = is_row & tl.reshape(tl.broadcast_to(is_group[:, None], (UNITS, ALIGN)), (TILE,))
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    row_amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, BLOCK)), 2)
    multiplier, scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
    m = tl.reshape(row[:, None] + tl.arange(0, ALIGN)[None, :], (TILE,)).to(tl.int64)
    is_inside = is_row[:, None] & (k[None, :] < K)
    tl.store(rows_ptr + m[:, None] * K + k[None, :], _encode(x * spread, R_MAX, R_E4M3), is_inside)
    block = first_k // BLOCK + tl.arange(0, BLOCKS)
    is_block = is_row[:, None] & (block[None, :] * BLOCK < K)
    tl.store(row_scales_ptr + m[:, None] + block[None, :] * R, scale, is_block)

    of_tokens = tl.where(is_token[:, None], magnitude, 0)
    column_amax = tl.max(tl.reshape(of_tokens, (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    codes = _encode(x * spread, C_MAX, C_E4M3)
    _store_transposed(columns_ptr, codes, is_token, first + tl.arange(0, TILE), k, C, K)
    block = first // BLOCK + tl.arange(0, BLOCKS)
    at = block.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(column_scales_ptr + at, scale, (block[:, None] * BLOCK < C) & (k[None, :] < K))


def group_constants(rows: CurrentScaling, columns: CurrentScaling, align: int) -> dict[str, object]:
    """What the kernel is compiled for."""
    return {**constants(rows, columns), "ALIGN": align}


def groups_both_directions(
    x: Tensor,
    offsets: Tensor,
    rows: CurrentScaling,
    columns: CurrentScaling,
    align: int,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Launch the kernel.

    Args:
        x: (R, K), any strides, float32, bfloat16 or float16; K is not 0.
        offsets: (E,), contiguous, int32.
        rows: Block (1, n), n a divisor of 128.
        columns: Block (n, 1).
        align: What a group's first column is a multiple of, a divisor of 128 and a multiple of n.
        outputs: Contiguous: codes (R, K) and scales (ceil(K / n), R) of rows, codes (K, C) and scales (C / n, K) of
            tokens.
    """
    (size, k), groups, length = x.shape, offsets.shape[0], outputs[2].shape[1]
    # groups, padded, and the rows behind them have at most so many columns, which may be more than there are
    grid = (triton.cdiv(size + groups * (align - 1), TILE), triton.cdiv(k, TILE))
    groups_both_kernel[grid](
        x, offsets, *outputs, size, k, groups, length, *x.stride(), **group_constants(rows, columns, align),
        num_warps=WARPS,
    )  # fmt: skip
