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

from fp8compile._compat import TileKernel, TileLaunch
from fp8compile.kernels.both_directions import TILE, WARPS, _encode, _scales, constants
from fp8compile.kernels.groups import _rows, _transposed, _units
from fp8compile.quantizers import CurrentScaling

__all__ = [
    "GROUPS_BOTH",
    "WARPS",
    "group_constants",
    "groups_both_directions",
    "groups_both_kernel",
    "groups_both_launch",
    "groups_both_places",
    "groups_both_store",
]


@triton.jit
def groups_both_places(offsets_ptr, R, K, E, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Rows and columns of the tile that a program's columns of codes hold; where there is one, and has a group."""
    UNITS: tl.constexpr = TILE // ALIGN
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    group, row, end = _units(offsets_ptr, tl.program_id(0) * TILE, E, ALIGN, UNITS)
    is_group = group < E
    m, is_row = _rows(row, tl.where(is_group, end, R), R, ALIGN, TILE)
    is_token = is_row & tl.reshape(tl.broadcast_to(is_group[:, None], (UNITS, ALIGN)), (TILE,))
    return m[:, None], k, is_row[:, None] & (k < K), is_row[:, None], is_token[:, None]


@triton.jit
def groups_both_store(
    x, m, k, is_inside, is_row, is_token, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, C,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
):  # fmt: skip
    """Store all but the rows' codes, which are returned. Columns that hold no row are zeros, never the largest."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    first, first_k = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64) * TILE
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    row_amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, BLOCK)), 2)
    multiplier, scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
    row_codes = _encode(x * spread, R_MAX, R_E4M3)
    block = first_k // BLOCK + tl.arange(0, BLOCKS)[None, :]
    tl.store(row_scales_ptr + m + block * R, scale, is_row & (block * BLOCK < K))

    column_amax = tl.max(tl.reshape(tl.where(is_token, magnitude, 0), (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    at, column, codes, is_stored = _transposed(_encode(x * spread, C_MAX, C_E4M3), is_token, k, K, C, TILE)
    tl.store(columns_ptr + at * C + column, codes, is_stored)
    block = first // BLOCK + tl.arange(0, BLOCKS).to(tl.int64)[:, None]
    tl.store(column_scales_ptr + block * K + k, scale, (block * BLOCK < C) & (k < K))
    return m, k, row_codes, is_inside


@triton.jit
def groups_both_kernel(
    x_ptr, offsets_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, E, C, stride_m, stride_k,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
):  # fmt: skip
    """One tile of columns of codes."""
    m, k, is_inside, is_row, is_token = groups_both_places(offsets_ptr, R, K, E, TILE, ALIGN)
    x = tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)
    m, k, codes, is_inside = groups_both_store(
        x, m, k, is_inside, is_row, is_token, row_scales_ptr, columns_ptr, column_scales_ptr, R, K, C,
        TILE, BLOCK, R_MAX, R_EXPONENT, R_E4M3, R_RULE, R_EPS, C_MAX, C_EXPONENT, C_E4M3, C_RULE, C_EPS,
    )  # fmt: skip
    tl.store(rows_ptr + m * K + k, codes, is_inside)


GROUPS_BOTH = TileKernel(
    module=__name__,
    places="groups_both_places",
    placed=("m", "k", "is_inside", "is_row", "is_token"),
    store="groups_both_store",
    inputs=("offsets_ptr",),
    outputs=("row_scales_ptr", "columns_ptr", "column_scales_ptr"),
    sizes=("R", "K", "E", "C"),
)


def group_constants(rows: CurrentScaling, columns: CurrentScaling, align: int) -> dict[str, object]:
    """What the kernel is compiled for."""
    return {**constants(rows, columns), "ALIGN": align}


def groups_both_launch(
    x: Tensor, offsets: Tensor, length: int, rows: CurrentScaling, columns: CurrentScaling, align: int
) -> TileLaunch:
    """How the kernel is launched.

    Args:
        x: (R, K); K is not 0.
        offsets: (E,), int32.
        length: C, the columns of codes along tokens.
        rows: Block (1, n), n a divisor of 128.
        columns: Block (n, 1).
        align: What a group's first column is a multiple of, a divisor of 128 and a multiple of n.
    """
    (size, k), groups = x.shape, offsets.shape[0]
    # groups, padded, and the rows behind them have at most so many columns, which may be more than there are
    grid = (triton.cdiv(size + groups * (align - 1), TILE), triton.cdiv(k, TILE), 1)
    sizes = {"R": size, "K": k, "E": groups, "C": length}
    return TileLaunch(GROUPS_BOTH, grid, sizes, group_constants(rows, columns, align), WARPS)


def groups_both_directions(
    x: Tensor, offsets: Tensor, outputs: tuple[Tensor, Tensor, Tensor, Tensor], launch: TileLaunch
) -> None:
    """Launch the kernel.

    Args:
        x: (R, K), any strides, float32, bfloat16 or float16; K is not 0.
        offsets: (E,), contiguous, int32.
        outputs: Contiguous: codes (R, K) and scales (ceil(K / n), R) of rows, codes (K, C) and scales (C / n, K) of
            tokens.
        launch: Of `groups_both_launch`.
    """
    strides = dict(zip(("stride_m", "stride_k"), x.stride(), strict=True))
    groups_both_kernel[launch.grid](
        x, offsets, *outputs, **launch.sizes, **strides, **launch.constants, num_warps=launch.warps
    )
