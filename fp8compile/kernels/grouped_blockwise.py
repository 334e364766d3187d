"""GEMMs of groups with blocks of 128 along the summed dim, for rows times a matrix and for sums over tokens.

Each sum of 128 products, which a tensor core has with about 14 bits, is multiplied by its scales and added in float32
(DeepSeek-V3 technical report, arXiv:2412.19437, 3.3.2). Only the device knows the sizes of groups, so the grid of
`rows_kernel` has enough programs for every split.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8compile.kernels.groups import SEARCHED, _sizes, _units

__all__ = ["STAGES", "WARPS", "multiply_rows", "multiply_tokens", "rows_kernel", "tokens_kernel"]

TILE = 128  # rows and columns of a program's part of the product, and length of a block of the summed dim
WARPS = 8
STAGES = 4  # each takes 32 KiB of shared memory


@triton.jit
def _summed(
    a_at, b_at, a_scale_at, b_scale_at, length, a_scale_step, b_scale_step,
    TILE: tl.constexpr, IS_EVEN: tl.constexpr, HAS_TILES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product, block by block of the summed dim; pointers are those of the first block.

    Codes are (TILE, TILE); the summed dim is dim 1 of ``a`` and dim 0 of ``b``, and is contiguous in both. Scales are
    (TILE,); with HAS_TILES, ``b`` has one scale for all columns. Without IS_EVEN the last block may be shorter.
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
    """Compute one tile of the product; programs without a group take rows after the last group, and write zeros."""
    columns = tl.cdiv(N, TILE)
    tile = tl.program_id(0) // columns
    first_n = tl.program_id(0) % columns * TILE
    found, row, stop = _units(offsets_ptr, tile * TILE, E, TILE, 1)
    group, first = tl.sum(found, 0), tl.sum(row, 0)
    m, n = first + tl.arange(0, TILE), first_n + tl.arange(0, TILE)
    is_group = group < E
    end = tl.where(is_group, tl.minimum(tl.sum(stop, 0), R), R)
    # rows and columns beyond the end of the last tile read the last row or column again, and are never stored
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
    """Number of blocks of tokens in all groups before ``group``."""
    blocks = 0
    for first in range(0, group, SEARCHED):
        blocks += tl.sum(tl.cdiv(_sizes(offsets_ptr, first + tl.arange(0, SEARCHED), group), TILE), 0)
    return blocks


@triton.jit
def tokens_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, d_ptr, N, K, C,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one group's matrix; the padding after a group's tokens adds nothing, because it is 0."""
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
    """Multiply each row by the matrix of its group; rows after the last group become zeros.

    Args:
        a: (R, K), contiguous, float8.
        b: (E, N, K), contiguous, float8.
        a_scale: (R, ceil(K / 128)), any strides, float32.
        b_scale: One for each 128 x 128 tile, (E, ceil(N / 128), ceil(K / 128)), or for each row, (E, N, ceil(K /
            128)).
        offsets: Ends of the groups, (E,), contiguous, int32.
        y: The result, (R, N), contiguous; R and N are not 0.
    """
    (rows, k), (groups, n, _) = a.shape, b.shape
    # the largest number of tiles that a split into groups and remaining rows can have
    tiles = (rows + (groups + 1) * (TILE - 1)) // TILE
    kinds = {"IS_EVEN": k % TILE == 0, "HAS_TILES": b_scale.shape[1] != n}
    rows_kernel[(tiles * triton.cdiv(n, TILE),)](
        a, b, a_scale, b_scale, offsets, y, rows, n, k, groups, *a_scale.stride(), *b_scale.stride(),
        TILE=TILE, **kinds, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def multiply_tokens(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, d: Tensor) -> None:
    """Multiply and sum over the tokens of each group; a group without tokens gets zeros.

    Args:
        a: Transposed codes (N, C), contiguous, float8; groups begin at multiples of 128 columns.
        b: Transposed codes (K, C), laid out like ``a``.
        a_scale: (C / 128, N), contiguous, float32.
        b_scale: (C / 128, K), contiguous, float32.
        offsets: Ends of the groups among the rows before transposing, (E,), contiguous, int32.
        d: The result, (E, N, K), contiguous; N and K are not 0.
    """
    groups, n, k = d.shape
    grid = (triton.cdiv(n, TILE) * triton.cdiv(k, TILE), groups)
    tokens_kernel[grid](
        a, b, a_scale, b_scale, offsets, d, n, k, a.shape[1], TILE=TILE, num_warps=WARPS, num_stages=STAGES
    )
