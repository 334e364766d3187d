"""Kernels that read a weight once: make codes for the forward, and amaxes for the cast in the backward.

    rows_kernel     each row     --amax--> multiplier --> codes, scale; also updates the amax of each column
    tiles_kernel    128 x 128    --amax of each square block--> multipliers --> codes, scales; also stores the amaxes

Codes and scales have the bits of `CurrentScaling`. Atomic maxima make column amaxes the same in any order of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.both_directions import (
    LIMIT_E4M3,
    LIMIT_E5M2,
    _encode,
    _of_direction,
    _saturation,
    _scales,
    _underflow,
    _value_of_scale,
)
from fp8compile.kernels.counts import is_beyond, is_underflow, store_counts
from fp8compile.kernels.programs import TILE, row_programs, rows_of_program, tile_programs
from fp8compile.kernels.values import values, write
from fp8compile.quantizers import CurrentScaling

__all__ = ["row_constants", "rows_and_columns", "rows_kernel", "square_blocks", "tile_constants", "tiles_kernel"]

ROW_WARPS = 16
TILE_WARPS = 16


@triton.jit
def _quantized_rows(
    x, scales_ptr, m, is_row,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
):  # fmt: skip
    """Quantize whole rows ``m`` and store their scales; return codes, and each column's amax as int32 bits."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    multiplier, scale = _scales(tl.max(magnitude, 1)[:, None], R_MAX, R_EXPONENT, R_RULE, R_EPS)
    tl.store(scales_ptr + m, scale, is_row)
    return _encode(x * multiplier, R_MAX, R_E4M3), tl.max(magnitude, 0)[None, :]


@triton.jit
def rows_kernel(
    x_ptr, codes_ptr, scales_ptr, column_amax_ptr, M, K, ROWS,
    WIDTH: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize ROWS whole rows of an (M, K) matrix one by one, and update the amax of each column.

    WIDTH is K rounded up to a power of two. Constants R_* describe the quantizer.
    """
    k = tl.arange(0, WIDTH)[None, :]
    largest = tl.zeros((1, WIDTH), tl.int32)
    underflow, beyond = 0, 0
    LIMIT: tl.constexpr = LIMIT_E4M3 if R_E4M3 else LIMIT_E5M2
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, M)):
        m = tl.full((1, 1), row, tl.int64)
        is_inside = (m < M) & (k < K)
        x = values(x_ptr, m, k, is_inside, K, 1)
        codes, of_row = _quantized_rows(x, scales_ptr, m, m < M, R_MAX, R_EXPONENT, R_E4M3, R_RULE, R_EPS)
        write(codes_ptr, m, k, codes, is_inside, K)
        largest = tl.maximum(largest, of_row)
        if counts_ptr is not None:
            _, scale = _scales(tl.max(of_row, 1)[:, None], R_MAX, R_EXPONENT, R_RULE, R_EPS)
            underflow += tl.sum(is_underflow(of_row, codes, 0x7F).to(tl.int32))
            beyond += tl.sum(is_beyond(of_row, _value_of_scale(scale, R_RULE), LIMIT).to(tl.int32))
    tl.atomic_max(column_amax_ptr + k, largest, k < K)
    if counts_ptr is not None:
        store_counts(counts_ptr, 0, tl.max(largest), underflow, beyond)


@triton.jit
def tiles_kernel(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, M, K,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize one tile, TILE x TILE, of an (M, K) matrix in square blocks, and store the blocks' amaxes.

    Blocks are BLOCK x BLOCK; elements beyond M and K count as 0. Constants R_* describe the quantizer.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    first_m, first_k = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    m, k = first_m + tl.arange(0, TILE), first_k + tl.arange(0, TILE)
    is_inside = (m[:, None] < M) & (k[None, :] < K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], is_inside, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(tl.reshape(magnitude, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 3), 1)
    multiplier, scale = _scales(amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.broadcast_to(multiplier[:, None, :, None], (BLOCKS, BLOCK, BLOCKS, BLOCK))
    codes = _encode(x * tl.reshape(spread, (TILE, TILE)), R_MAX, R_E4M3)
    tl.store(codes_ptr + m[:, None] * K + k[None, :], codes, is_inside)
    if counts_ptr is not None:
        scales = tl.broadcast_to(scale[:, None, :, None], (BLOCKS, BLOCK, BLOCKS, BLOCK))
        saturation = _saturation(magnitude, tl.reshape(scales, (TILE, TILE)), R_E4M3, R_RULE)
        store_counts(counts_ptr, 0, tl.max(magnitude), _underflow(magnitude, codes), saturation)
    block_m, block_k = first_m // BLOCK + tl.arange(0, BLOCKS), first_k // BLOCK + tl.arange(0, BLOCKS)
    is_block = (block_m[:, None] * BLOCK < M) & (block_k[None, :] * BLOCK < K)
    at = block_m[:, None] * tl.cdiv(K, BLOCK) + block_k[None, :]
    tl.store(scales_ptr + at, scale, is_block)
    tl.store(amax_ptr + at, amax, is_block)


def row_constants(quantizer: CurrentScaling, k: int) -> dict[str, object]:
    """Return the compile-time constants of `rows_kernel` for rows of ``k`` elements."""
    return {"WIDTH": triton.next_power_of_2(k), **_of_direction("R", quantizer)}


def tile_constants(quantizer: CurrentScaling) -> dict[str, object]:
    """Return the compile-time constants of `tiles_kernel` for a quantizer with a square block."""
    return {"TILE": TILE, "BLOCK": quantizer.block[0], **_of_direction("R", quantizer)}


def rows_and_columns(
    x: Tensor, quantizer: CurrentScaling, codes: Tensor, scale: Tensor, amax: Tensor, counts: Tensor | None = None
) -> None:
    """Launch `rows_kernel` for block (1, -1): write codes and scales of rows, and the amax of each column.

    ``x`` is (M, K), contiguous, with no size 0. ``amax``, (1, K) float32, must be zeros before the launch. ``counts``
    receives the statistics that `fp8compile.ops.counting_kernels` describes; None to compute none.
    """
    m, k = x.shape
    rows, bits, chosen = rows_of_program(x.shape), amax.view(torch.int32), row_constants(quantizer, k)
    rows_kernel[row_programs(x.shape)](
        x, codes, scale, bits, m, k, rows, **chosen, counts_ptr=counts, num_warps=ROW_WARPS
    )


def square_blocks(
    x: Tensor, quantizer: CurrentScaling, codes: Tensor, scale: Tensor, amax: Tensor, counts: Tensor | None = None
) -> None:
    """Launch `tiles_kernel`, which writes codes, scales and amaxes of square blocks.

    The quantizer's block is (n, n), n a divisor of 128. ``x`` is (M, K), contiguous, with no size 0. ``counts``
    receives the statistics that `fp8compile.ops.counting_kernels` describes; None to compute none.
    """
    m, k = x.shape
    bits, chosen = amax.view(torch.int32), tile_constants(quantizer)
    tiles_kernel[tile_programs(x.shape)](
        x, codes, scale, bits, m, k, **chosen, counts_ptr=counts, num_warps=TILE_WARPS
    )
