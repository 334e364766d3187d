"""Grouped products of codes with a scale for 128 values of the sum, for Hopper; PyTorch has no such product.

    rows     y_RN  = a_RK @ b_e,NK^T    a tile of 128 rows of one group, or of rows behind the last, by 128 columns
    tokens   d_eNK = a_NC @ b_KC^T      a tile of 128 x 128 of one group's matrix

A tensor core sums 128 products, and keeps 14 bits of the largest. Each such sum is multiplied by its scales and added
in float32, so no error grows with the length of the sum. (DeepSeek-V3 technical report, arXiv:2412.19437, 3.3.2.)

The tile of a program depends on the sizes of groups, which only the device knows. So the grid of `rows` has enough
programs for every split of the rows.

This module needs Triton; `fp8compile.ops.gemms.grouped` imports it when a GPU asks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.groups import SEARCHED, _sizes, _units

__all__ = ["STAGES", "WARPS", "multiply_rows", "multiply_tokens", "rows_kernel", "tokens_kernel"]

TILE = 128  # of the product, and a block of the sum
WARPS = 8
STAGES = 4  # 32 KiB of shared memory each


@triton.jit
def _summed(
    a_at, b_at, a_scale_at, b_scale_at, length, a_scale_step, b_scale_step,
    TILE: tl.constexpr, IS_EVEN: tl.constexpr, HAS_TILES: tl.constexpr,
):  # fmt: skip
    """The sum over blocks of a tile of products.

    Pointers are those of the first block: codes (TILE, TILE), the sum along dim 1 of ``a`` and dim 0 of ``b``, which
    lies side by side in both, and scales (TILE,), or with HAS_TILES one for all columns of ``b``. Without IS_EVEN the
    last block may be a part.
    """
    total = tl.zeros((TILE, TILE), tl.float32)
    k = tl.arange(0, TILE)
    for block in range(tl.cdiv(length, TILE)):
        if IS_EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            is_inside = k < length - block * TILE
            a = tl.load(a_at, is_inside[None, :], other=0.0)
            b = tl.load(b_at, is_inside[:, None], other=0.0)
        product = tl.dot(a, b)
        a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
        if HAS_TILES:
            total += product * (a_scale * b_scale)[:, None]
        else:
            total += product * a_scale[:, None] * b_scale[None, :]
        a_at += TILE
        b_at += TILE
        a_scale_at += a_scale_step
        b_scale_at += b_scale_step
    return total


@triton.jit
def rows_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, y_ptr, R, N, K, E,
    a_scale_stride_m, a_scale_stride_k, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k,
    TILE: tl.constexpr, IS_EVEN: tl.constexpr, HAS_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of rows and columns; spare programs have rows behind the last group, and write zeros."""
    columns = tl.cdiv(N, TILE)
    tile = tl.program_id(0) // columns
    first_n = tl.program_id(0) % columns * TILE
    found, row, stop = _units(offsets_ptr, tile * TILE, E, TILE, 1)
    group, first = tl.sum(found, 0), tl.sum(row, 0)
    m, n = first + tl.arange(0, TILE), first_n + tl.arange(0, TILE)
    is_group = group < E
    end = tl.where(is_group, tl.minimum(tl.sum(stop, 0), R), R)
    # rows and columns of the last tile that are no more there are the last one again, and never stored
    from_m, from_n = tl.minimum(m, tl.maximum(end - 1, 0)).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    of_group, k = tl.where(is_group, group, 0).to(tl.int64), tl.arange(0, TILE)
    total = _summed(
        a_ptr + from_m[:, None] * K + k[None, :],
        b_ptr + (of_group * N + from_n[None, :]) * K + k[:, None],
        a_scale_ptr + from_m * a_scale_stride_m,
        b_scale_ptr + of_group * b_scale_stride_e + (first_n // TILE if HAS_TILES else from_n) * b_scale_stride_n,
        tl.where(is_group, K, 0), a_scale_stride_k, b_scale_stride_k,
        TILE, IS_EVEN=IS_EVEN, HAS_TILES=HAS_TILES,
    )  # fmt: skip
    is_stored = (m < end)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), is_stored)


@triton.jit
def _blocks_before(offsets_ptr, group, TILE: tl.constexpr):
    """Number of blocks of tokens in all groups before one."""
    blocks = 0
    for first in range(0, group, SEARCHED):
        blocks += tl.sum(tl.cdiv(_sizes(offsets_ptr, first + tl.arange(0, SEARCHED), group), TILE), 0)
    return blocks


@triton.jit
def tokens_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, d_ptr, N, K, C,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one group's matrix; the padding behind a group's tokens has codes 0."""
    columns = tl.cdiv(K, TILE)
    n = tl.program_id(0) // columns * TILE + tl.arange(0, TILE)
    k = tl.program_id(0) % columns * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    first = _blocks_before(offsets_ptr, group, TILE).to(tl.int64)
    length = tl.minimum(_sizes(offsets_ptr, group, group + 1), C - first * TILE)
    from_n, from_k = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(k, K - 1).to(tl.int64)
    c = first * TILE + tl.arange(0, TILE)
    total = _summed(
        a_ptr + from_n[:, None] * C + c[None, :],
        b_ptr + from_k[None, :] * C + c[:, None],
        a_scale_ptr + first * N + from_n,
        b_scale_ptr + first * K + from_k,
        length, N, K,
        TILE, IS_EVEN=True, HAS_TILES=False,
    )  # fmt: skip
    at = (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(d_ptr + at, total.to(d_ptr.dtype.element_ty), (n < N)[:, None] & (k < K)[None, :])


def multiply_rows(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, y: Tensor) -> None:
    """Multiply each row by the matrix of its group; rows behind the last group become zeros.

    Args:
        a: (R, K), contiguous, float8.
        b: (E, N, K), contiguous, float8.
        a_scale: (R, ceil(K / 128)), any strides, float32.
        b_scale: (E, ceil(N / 128), ceil(K / 128)), of tiles, or (E, N, ceil(K / 128)), any strides, float32.
        offsets: (E,), contiguous, int32.
        y: (R, N), contiguous; neither is 0.
    """
    (rows, k), (groups, n, _) = a.shape, b.shape
    # any split into groups and rows behind them has at most so many tiles
    tiles = (rows + (groups + 1) * (TILE - 1)) // TILE
    kinds = {"IS_EVEN": k % TILE == 0, "HAS_TILES": b_scale.shape[1] != n}
    rows_kernel[(tiles * triton.cdiv(n, TILE),)](
        a, b, a_scale, b_scale, offsets, y, rows, n, k, groups, *a_scale.stride(), *b_scale.stride(),
        TILE=TILE, **kinds, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def multiply_tokens(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, d: Tensor) -> None:
    """Multiply over the tokens of each group; a group without tokens gets zeros.

    Args:
        a: (N, C), contiguous, float8: transposed codes, the groups from multiples of 128 columns.
        b: (K, C), likewise.
        a_scale: (C / 128, N), contiguous, float32.
        b_scale: (C / 128, K), likewise.
        offsets: (E,), contiguous, int32: ends of the groups among the rows that the codes were made of.
        d: (E, N, K), contiguous; N and K are not 0.
    """
    groups, n, k = d.shape
    grid = (triton.cdiv(n, TILE) * triton.cdiv(k, TILE), groups)
    tokens_kernel[grid](
        a, b, a_scale, b_scale, offsets, d, n, k, a.shape[1], TILE=TILE, num_warps=WARPS, num_stages=STAGES
    )
