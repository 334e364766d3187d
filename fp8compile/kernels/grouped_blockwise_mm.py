"""Grouped GEMMs that PyTorch lacks: float8 codes with a scale for each block of 128 products, or for a whole sum.

    product                             tile of a program
    rows     y_RN  = a_RK @ b_e,NK^T    128 columns by 128 or 64 rows of one group, or of rows after the last group
    tokens   d_eNK = a_NC @ b_KC^T      128 or 64 by 128 of one group's matrix

Subscripts are sizes: R rows in groups e, C tokens after padding. Hopper's tensor cores sum 128 products with about 14
bits of precision. These short sums are added in float32, so the error does not grow with the length of the whole sum
(DeepSeek-V3 technical report, arXiv:2412.19437, 3.3.2). Scales of blocks of 128 multiply each short sum; scales of
rows multiply the whole sum, once.

Only the device knows the sizes of groups, so the grid of `rows_kernel` has enough programs for any split into groups.
This module needs Triton; `fp8compile.ops.groups.grouped_blockwise_mm` imports it for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.kernels.group_amax_and_cast import SEARCHED, _sizes, _units
from fp8compile.kernels.launch import Candidates, Launch
from fp8compile.target import Target, target_of

__all__ = ["candidates", "multiply_rows", "multiply_tokens", "rows_kernel", "tokens_kernel"]

TILE = 128  # columns of a program's part of the product, and length of a block of the summed dim


@triton.jit
def _summed(
    a_at, b_at, a_scale_at, b_scale_at, length, a_scale_step, b_scale_step,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_TILES: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute a scaled float32 tile of the product, in blocks of TILE along the summed dim, which is contiguous.

    Pointers point to the first block: codes (ROWS, TILE) and (TILE, TILE), scales (ROWS,) and (TILE,). A step is the
    distance to the next block's scales. With HAS_TILES, ``b`` has one scale for all columns of a block. With IS_WHOLE,
    a scale holds for the whole summed dim and is applied once, after the sum; a sum of no elements is 0 for any scale.
    If IS_EVEN is False, the last block is masked.
    """
    total = tl.zeros((ROWS, TILE), tl.float32)
    k = tl.arange(0, TILE)
    # num_stages here, not only as an option of the launch: scales are copied ahead too, not only operands of tl.dot
    for block in tl.range(tl.cdiv(length, TILE), num_stages=STAGES):
        if IS_EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            is_inside = k < length - block * TILE
            a = tl.load(a_at, is_inside[None, :], other=0.0)
            b = tl.load(b_at, is_inside[:, None], other=0.0)
        if IS_WHOLE:
            total = tl.dot(a, b, total, max_num_imprecise_acc=TILE)
        else:
            product = tl.dot(a, b)
            a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
            if HAS_TILES:
                total += product * (a_scale * b_scale)[:, None]
            else:
                total += product * a_scale[:, None] * b_scale[None, :]
            a_scale_at += a_scale_step
            b_scale_at += b_scale_step
        a_at += TILE
        b_at += TILE
    if IS_WHOLE:
        scaled = total * tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
        total = tl.where(length > 0, scaled, 0.0)
    return total


@triton.jit
def _codes(ptr, IS_E4M3: tl.constexpr):
    FLOAT8: tl.constexpr = tl.float8e4nv if IS_E4M3 else tl.float8e5
    return ptr.to(tl.pointer_type(FLOAT8), bitcast=True)


@triton.jit
def rows_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, y_ptr, R, N, K, E,
    a_scale_stride_m, a_scale_stride_k, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_TILES: tl.constexpr, IS_WHOLE: tl.constexpr,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y, (R, N): rows of ``a``, (R, K), times their group's transposed matrix in ``b``, (E, N, K).

    Rows after the last group get zeros. For IS_EVEN, HAS_TILES and IS_WHOLE see `_summed`. Codes are bytes.
    """
    columns = tl.cdiv(N, TILE)
    tile = tl.program_id(0) // columns
    first_n = tl.program_id(0) % columns * TILE
    found, row, stop = _units(offsets_ptr, tile * ROWS, E, ROWS, 1)
    group, first = tl.sum(found, 0), tl.sum(row, 0)
    m, n = first + tl.arange(0, ROWS), first_n + tl.arange(0, TILE)
    is_group = group < E
    end = tl.where(is_group, tl.minimum(tl.sum(stop, 0), R), R)
    # rows and columns beyond the end of the last tile read the last row or column again, and are never stored
    from_m, from_n = tl.minimum(m, tl.maximum(end - 1, 0)).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    of_group, k = tl.where(is_group, group, 0).to(tl.int64), tl.arange(0, TILE)
    total = _summed(
        _codes(a_ptr, A_E4M3) + from_m[:, None] * K + k[None, :],
        _codes(b_ptr, B_E4M3) + (of_group * N + from_n[None, :]) * K + k[:, None],
        a_scale_ptr + from_m * a_scale_stride_m,
        b_scale_ptr + of_group * b_scale_stride_e + (first_n // TILE if HAS_TILES else from_n) * b_scale_stride_n,
        tl.where(is_group, K, 0), a_scale_stride_k, b_scale_stride_k,
        ROWS, TILE, STAGES, IS_EVEN=IS_EVEN, HAS_TILES=HAS_TILES, IS_WHOLE=IS_WHOLE,
    )  # fmt: skip
    is_stored = (m < end)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), is_stored)


@triton.jit
def _blocks_before(offsets_ptr, group, ALIGN: tl.constexpr):
    blocks = 0
    for first in range(0, group, SEARCHED):
        blocks += tl.sum(tl.cdiv(_sizes(offsets_ptr, first + tl.arange(0, SEARCHED), group), ALIGN), 0)
    return blocks


@triton.jit
def tokens_kernel(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, offsets_ptr, d_ptr, N, K, C,
    a_scale_stride_c, a_scale_stride_n, b_scale_stride_c, b_scale_stride_k,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, IS_WHOLE: tl.constexpr,
    A_E4M3: tl.constexpr, B_E4M3: tl.constexpr,
):  # fmt: skip
    """Compute one ROWS x TILE tile of one group's matrix, (N, K): the product over the group's tokens.

    Codes are (N, C) and (K, C), with C tokens after padding by codes 0; groups begin at multiples of ALIGN. If ALIGN
    is not TILE, the last block is masked, because the next group begins in it. For IS_WHOLE see `_summed`.
    """
    columns = tl.cdiv(K, TILE)
    n = tl.program_id(0) // columns * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % columns * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    runs = _blocks_before(offsets_ptr, group, ALIGN).to(tl.int64)
    # with the padding, because a mask of whole runs leaves loads whole
    length = tl.minimum(tl.cdiv(_sizes(offsets_ptr, group, group + 1), ALIGN) * ALIGN, C - runs * ALIGN)
    from_n, from_k = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(k, K - 1).to(tl.int64)
    c = runs * ALIGN + tl.arange(0, TILE)
    scale = group.to(tl.int64) if IS_WHOLE else runs
    total = _summed(
        _codes(a_ptr, A_E4M3) + from_n[:, None] * C + c[None, :],
        _codes(b_ptr, B_E4M3) + from_k[None, :] * C + c[:, None],
        a_scale_ptr + scale * a_scale_stride_c + from_n * a_scale_stride_n,
        b_scale_ptr + scale * b_scale_stride_c + from_k * b_scale_stride_k,
        length, a_scale_stride_c, b_scale_stride_c,
        ROWS, TILE, STAGES, IS_EVEN=ALIGN == TILE, HAS_TILES=False, IS_WHOLE=IS_WHOLE,
    )  # fmt: skip
    at = (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(d_ptr + at, total.to(d_ptr.dtype.element_ty), (n < N)[:, None] & (k < K)[None, :])


def candidates(target: Target) -> Candidates:
    """Return tiles with as many pipeline stages as fit into the GPU's shared memory; a stage has codes of a block.

    Two programs with 64 rows fit on a multiprocessor of an H200.
    """
    found = []
    for rows, warps, most in ((128, 8, 4), (64, 4, 3)):
        stages = min(most, target.shared_memory // ((rows + TILE) * TILE))
        found.append(Config({"ROWS": rows, "STAGES": stages}, num_warps=warps, num_stages=stages))
    return tuple(found)


def _named_strides(names: str, tensor: Tensor) -> dict[str, object]:
    return dict(zip(names.split(), tensor.stride(), strict=True))


def multiply_rows(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, y: Tensor, *,
    formats: tuple[bool, bool], is_whole: bool,
) -> Launch:  # fmt: skip
    """Return the launch that multiplies each row of ``a`` by its group's transposed matrix in ``b``.

    Rows after the last group become zeros.

    Args:
        a: Codes (R, K), contiguous, uint8.
        b: Codes (E, N, K), a matrix for each group, contiguous, uint8.
        a_scale: (R, ceil(K / 128)), or (R or 1, 1) with ``is_whole``; any strides, float32.
        b_scale: One scale for each 128 x 128 tile, (E, ceil(N / 128), ceil(K / 128)), or for each row,
            (E, N, ceil(K / 128)), or (E, N or 1, 1) with ``is_whole``; any strides, float32.
        offsets: Ends of the groups among the rows of ``a``, (E,), contiguous, int32.
        y: The result, (R, N), contiguous.
        formats: Whether the codes of ``a`` and of ``b`` are e4m3; otherwise e5m2.
        is_whole: Whether one scale holds for a whole row of codes.
    """
    (rows, k), (groups, n, _) = a.shape, b.shape
    pointers = {"a_ptr": a, "b_ptr": b, "a_scale_ptr": a_scale, "b_scale_ptr": b_scale, "offsets_ptr": offsets}
    sizes = {"y_ptr": y, "R": rows, "N": n, "K": k, "E": groups}
    kinds = {"IS_EVEN": k % TILE == 0, "HAS_TILES": not is_whole and b_scale.shape[1] != n, "IS_WHOLE": is_whole}
    if is_whole:  # the scale of a group's operand is that of each of its rows
        a_scale, b_scale = a_scale.expand(rows, 1), b_scale.expand(groups, n, 1)
    strides = _named_strides("a_scale_stride_m a_scale_stride_k", a_scale)
    strides |= _named_strides("b_scale_stride_e b_scale_stride_n b_scale_stride_k", b_scale)

    def grid(candidate: Mapping[str, int]) -> tuple[Any, ...]:
        # the largest number of tiles that a split into groups and remaining rows can have; no rows, no tiles
        tile = candidate["ROWS"]
        tiles = torch.sym_min((rows + (groups + 1) * (tile - 1)) // tile, rows * (groups + 2))
        return (tiles * triton.cdiv(n, TILE),)

    return Launch(
        kernel=rows_kernel,
        grid=grid,
        arguments=pointers | sizes | strides | kinds | {"TILE": TILE, "A_E4M3": formats[0], "B_E4M3": formats[1]},
        writes=("y_ptr",),
        candidates=candidates(target_of(a.device)),
    )


def multiply_tokens(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, d: Tensor, *,
    formats: tuple[bool, bool], align: int, is_whole: bool,
) -> Launch:  # fmt: skip
    """Return the launch that computes ``a @ b.T`` over the tokens of each group; a group without tokens gets zeros.

    Args:
        a: Transposed codes (N, C), with C tokens after padding, contiguous, uint8.
        b: Transposed codes (K, C), contiguous, uint8.
        a_scale: (C / 128, N), or (E, N or 1) with ``is_whole``; any strides, float32.
        b_scale: (C / 128, K), or (E, K or 1) with ``is_whole``; any strides, float32.
        offsets: Ends of the groups among the tokens before padding, (E,), contiguous, int32.
        d: The result, (E, N, K), contiguous.
        formats: Whether the codes of ``a`` and of ``b`` are e4m3; otherwise e5m2.
        align: Groups begin at multiples of this number of columns; 128 without ``is_whole``.
        is_whole: Whether a group has one scale for each row of codes.
    """
    groups, n, k = d.shape
    pointers = {"a_ptr": a, "b_ptr": b, "a_scale_ptr": a_scale, "b_scale_ptr": b_scale, "offsets_ptr": offsets}
    if is_whole:
        a_scale, b_scale = a_scale.expand(-1, n), b_scale.expand(-1, k)
    strides = _named_strides("a_scale_stride_c a_scale_stride_n", a_scale)
    strides |= _named_strides("b_scale_stride_c b_scale_stride_k", b_scale)
    kinds = {"TILE": TILE, "ALIGN": align, "IS_WHOLE": is_whole, "A_E4M3": formats[0], "B_E4M3": formats[1]}
    return Launch(
        kernel=tokens_kernel,
        grid=lambda candidate: (triton.cdiv(n, candidate["ROWS"]) * triton.cdiv(k, TILE), groups),
        arguments=pointers | {"d_ptr": d, "N": n, "K": k, "C": a.shape[1]} | strides | kinds,
        writes=("d_ptr",),
        candidates=candidates(target_of(a.device)),
    )
