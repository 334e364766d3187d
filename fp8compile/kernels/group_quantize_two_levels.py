"""Kernels that make four-bit codes of groups of tokens along rows and along tokens.

    amaxes_kernel    64 tokens x 128 --atomic maxima--> two amaxes of each group: of values, and of Hadamard sums
    codes_kernel     the same tile, with the amaxes of its group --> codes and scales along rows and along tokens

Transposed codes have a column for each token; each tile of 128 columns belongs to one group
(`fp8compile.ops.groups.four_bit_tiles`). Padding, and codes of rows after the last group, are zeros. Each group has
the bits that `TwoLevelScaling` makes of it alone, unless a GPU's own instruction rounds (`stochastic_cvt.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.kernels.group_amax_and_cast import SEARCHED, _sizes
from fp8compile.kernels.launch import Launch
from fp8compile.kernels.quantize_two_levels import (
    CANDIDATES,
    COLUMNS,
    GROUPS,
    OUTPUTS,
    _magnitude,
    _outer,
    _outer_scale,
    _packed_columns,
    _packed_rows,
    _place_in_tiles,
    _sum,
    _words,
    constants,
)
from fp8compile.quantizers import TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS
from fp8compile.target import Target, target_of

__all__ = [
    "AMAX_CANDIDATES",
    "amax_constants",
    "amaxes_kernel",
    "amaxes_of_groups",
    "code_constants",
    "codes_kernel",
    "codes_of_groups",
]

# loads are then 8 bytes of bfloat16; with 8 warps and a transform ptxas spills registers
AMAX_CANDIDATES = (Config({}, num_warps=4),)

SIXTEEN, TILE = tl.constexpr(GROUP), tl.constexpr(TILE_ROWS)
BLOCKS_OF_TILE = tl.constexpr(TILE_BLOCKS)


@triton.jit
def _tiles(size, e, E):
    """Return how many 128-column tiles each group ``e``, of ``size`` tokens, has: at least 1, but 0 if e >= E."""
    return tl.where(e < E, tl.maximum(tl.cdiv(size, TILE), 1), 0)


@triton.jit
def _group_of(offsets_ptr, tile, E):
    """Return a tile's group (E for none), this group's first tile and row, and how many earlier groups are empty."""
    group, first, start, empty, tiles = 0, 0, 0, 0, 0
    for first_e in range(0, E, SEARCHED):
        e = first_e + tl.arange(0, SEARCHED)
        size = _sizes(offsets_ptr, e, E)
        own = _tiles(size, e, E)
        is_before = (tiles + tl.cumsum(own, 0) <= tile) & (e < E)
        group += tl.sum(is_before.to(tl.int32), 0)
        first += tl.sum(tl.where(is_before, own, 0), 0)
        start += tl.sum(tl.where(is_before, size, 0), 0)
        empty += tl.sum((is_before & (size == 0)).to(tl.int32), 0)
        tiles += tl.sum(own, 0)
    return group, first, start, empty


@triton.jit
def _end(offsets_ptr, group, R, E):
    return tl.minimum(tl.load(offsets_ptr + group, group < E, other=R), R)


@triton.jit
def _sixteen(x_ptr, row, end, k, K, stride_m, stride_k, is_group):
    """Load blocks of sixteen rows as sixteen float32 tensors: tensor i has row i of each; 0 from row ``end`` on."""
    xs = ()
    for i in tl.static_range(SIXTEEN):
        m = row + i
        at = m.to(tl.int64)[:, None] * stride_m + k[None, :] * stride_k
        is_token = (m < end)[:, None] & (k < K)[None, :] & is_group
        xs += (tl.load(x_ptr + at, is_token, other=0.0).to(tl.float32),)
    return xs


@triton.jit
def amaxes_kernel(
    x_ptr, offsets_ptr, amaxes_ptr, R, K, E, stride_m, stride_k,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    C_TRANSFORM: tl.constexpr, C_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Update the amaxes of E groups, (2, E), with one tile of ``x``, (R, K), atomically.

    Row 0 is for codes along rows (HAS_ROWS), and has amaxes of values. Row 1 is for codes along tokens (HAS_COLUMNS),
    and has amaxes of Hadamard sums with C_TRANSFORM, else of values. Without offsets, all rows are one group. A tile
    has GROUPS * 16 tokens and COLUMNS features. Bit i of C_NEGATIVE is 1 if the transform's sign i is negative.
    """
    column = tl.program_id(0) * (GROUPS * SIXTEEN)
    group, first, start, end = 0, 0, 0, R
    if offsets_ptr is not None:
        group, first, start, _ = _group_of(offsets_ptr, column // TILE, E)
        end = _end(offsets_ptr, group, R, E)
    k = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = start + column - first * TILE + tl.arange(0, GROUPS) * SIXTEEN
    xs = ()
    for i in tl.static_range(SIXTEEN):
        m = (row + i).to(tl.int64)[:, None]
        is_inside = (row + i < end)[:, None] & (k < K)
        xs += (tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32),)
    bits_ptr = amaxes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)  # nonnegative floats order like their bits
    if HAS_ROWS:
        largest = tl.zeros((GROUPS, COLUMNS), tl.int32)
        for i in tl.static_range(SIXTEEN):
            largest = tl.maximum(largest, _magnitude(xs[i]))
        tl.atomic_max(bits_ptr + group, tl.max(tl.max(largest, 1), 0), group < E, sem="relaxed")
    if HAS_COLUMNS:
        largest = tl.zeros((GROUPS, COLUMNS), tl.int32)
        for j in tl.static_range(SIXTEEN):
            largest = tl.maximum(largest, _magnitude(_sum(xs, j, C_TRANSFORM, C_NEGATIVE)))
        tl.atomic_max(bits_ptr + E + group, tl.max(tl.max(largest, 1), 0), group < E, sem="relaxed")


@triton.jit
def _store_outer_scales(amax_ptr, outer_ptr, E, IS_TE: tl.constexpr):
    for first_e in range(0, E, SEARCHED):
        e = first_e + tl.arange(0, SEARCHED)
        amax = tl.load(amax_ptr + e, e < E, other=0.0)
        tl.store(outer_ptr + e, _outer_scale(amax, IS_TE), e < E)


@triton.jit
def _along_tokens(
    xs, codes_ptr, scales_ptr, outer, column, tile, first, size, inside, is_block, k, K, C,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr,
    TRANSFORM: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize a tile in blocks of sixteen tokens; store codes and scales transposed.

    The tile's group begins at tile ``first`` and has ``size`` tokens; ``size`` is -1 if the tile is in no group. Codes
    and scales are 0 where ``is_block`` is False.
    """
    BLOCKS: tl.constexpr = TILE // SIXTEEN
    packed, scale = _packed_columns(
        xs, inside, k, K, outer, GROUPS, COLUMNS, IS_TE, ROUNDING, SEED, TRANSFORM, NEGATIVE
    )
    packed = tl.where(is_block[:, None], packed, 0)
    scale = tl.where(is_block[:, None] & (k < K)[None, :], scale, 0).to(tl.uint8)
    unit = column // SIXTEEN + tl.arange(0, GROUPS)
    is_column = column < C
    at = _words(codes_ptr) + k[:, None] * (C // SIXTEEN) + unit[None, :]
    tl.store(at, tl.trans(packed), (k < K)[:, None] & is_column)
    # all tiles of a group are contiguous, over all features; each tile after the last group counts as its own group
    is_own = size >= 0
    first, tiles = tl.where(is_own, first, tile), tl.where(is_own, tl.maximum(tl.cdiv(size, TILE), 1), 1)
    before = first.to(tl.int64) * BLOCKS * tl.cdiv(K, TILE) * TILE
    place = _place_in_tiles(k[:, None], unit[None, :] - first * BLOCKS, tiles * BLOCKS)
    tl.store(scales_ptr + before + place, tl.trans(scale), is_column & (k >= 0)[:, None])


@triton.jit
def _along_rows(
    x, codes_ptr, scales_ptr, outer, m, end, is_group, inside, scale_row, is_tile, k, K,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr,
):  # fmt: skip
    """Quantize rows ``m`` in blocks of 16 of their K columns, and store codes and scales.

    ``x`` has the values at rows ``m`` and columns ``k``, ``outer`` is from `_outer`. Rows from ``end`` on are not
    stored. If ``is_group`` is False, the tile belongs to no group, and its codes and scales are 0. ``inside`` has the
    rows' positions in their group, ``scale_row`` their rows among the scales, ``is_tile`` whether scales are stored.
    """
    BLOCKS: tl.constexpr = COLUMNS // SIXTEEN
    split: tl.constexpr = (GROUPS, BLOCKS, SIXTEEN)
    x, position = tl.reshape(x, split), tl.reshape(inside.to(tl.int64)[:, None] * K + k[None, :], split)
    packed, scale = _packed_rows(x, position, outer, IS_TE, ROUNDING, SEED)
    words = tl.cdiv(K, 2 * SIXTEEN) * 2  # number of 64-bit words of a row, even so that rows are multiples of 16 bytes
    block, is_row = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), m < end
    at = _words(codes_ptr) + m.to(tl.int64)[:, None] * words + block[None, :]
    tl.store(at, tl.where(is_group, packed, 0), is_row[:, None] & (block < words)[None, :])
    has_scale = is_row[:, None] & (block * SIXTEEN < K)[None, :] & is_group
    is_tile = is_tile & (block < tl.cdiv(words, BLOCKS_OF_TILE) * BLOCKS_OF_TILE)[None, :]
    place = _place_in_tiles(scale_row.to(tl.int64)[:, None], block[None, :], words)
    tl.store(scales_ptr + place, tl.where(has_scale, scale, 0).to(tl.uint8), is_tile)


@triton.jit
def codes_kernel(
    x_ptr, offsets_ptr, amaxes_ptr,
    rows_ptr, row_scales_ptr, row_outer_ptr, columns_ptr, column_scales_ptr, column_outer_ptr,
    R, K, E, C, stride_m, stride_k,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr,
    HAS_ROWS: tl.constexpr, R_ROUNDING: tl.constexpr, R_SEED: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, C_ROUNDING: tl.constexpr, C_SEED: tl.constexpr,
    C_TRANSFORM: tl.constexpr, C_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of ``x``, (R, K), along rows (HAS_ROWS) and along tokens (HAS_COLUMNS).

    A tile has GROUPS * 16 tokens of one of E groups and COLUMNS columns; sixteen codes are one int64. C is the number
    of columns of transposed codes. IS_TE chooses TransformerEngine's rule of scales; R_* and C_* describe the
    quantizers along rows and along tokens.
    """
    column = tl.program_id(0) * (GROUPS * SIXTEEN)
    tile = column // TILE
    group, first, start, empty = _group_of(offsets_ptr, tile, E)
    end = _end(offsets_ptr, group, R, E)
    is_group, amax_at = group < E, tl.minimum(group, E - 1)
    row_amax_ptr, column_amax_ptr = amaxes_ptr, amaxes_ptr + E
    k = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column - first * TILE + tl.arange(0, GROUPS) * SIXTEEN  # positions in the group
    row = start + inside
    if HAS_COLUMNS:
        outer = _outer(tl.load(column_amax_ptr + amax_at), IS_TE)
        size = tl.where(is_group, tl.maximum(end - start, 0), -1)
        xs = _sixteen(x_ptr, row, end, k, K, stride_m, stride_k, is_group)
        _along_tokens(
            xs, columns_ptr, column_scales_ptr, outer, column, tile, first, size, inside, (row < end) & is_group,
            k, K, C, GROUPS, COLUMNS, IS_TE, C_ROUNDING, C_SEED, C_TRANSFORM, C_NEGATIVE,
        )  # fmt: skip
    if HAS_ROWS:
        row_outer = _outer(tl.load(row_amax_ptr + amax_at), IS_TE)
        # scales along rows have no tile for a group without tokens; its program fills one of the tiles left at the end
        is_empty = is_group & (end <= start)
        scale_tile = tl.where(is_empty, C // TILE - 1 - empty, tile - empty)
        scale_row = scale_tile * TILE + column % TILE + tl.arange(0, GROUPS) * SIXTEEN
        is_tile = (column < C) & (scale_tile >= 0)
        for i in range(SIXTEEN):  # not unrolled: loads hit the cache, and the code is sixteen times shorter
            m = row + i
            at = x_ptr + m.to(tl.int64)[:, None] * stride_m + k[None, :] * stride_k
            x = tl.load(at, (m < end)[:, None] & (k < K)[None, :] & is_group, other=0.0).to(tl.float32)
            _along_rows(
                x, rows_ptr, row_scales_ptr, row_outer, m, end, is_group, inside + i, scale_row + i, is_tile, k, K,
                GROUPS, COLUMNS, IS_TE, R_ROUNDING, R_SEED,
            )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        if HAS_ROWS:
            _store_outer_scales(row_amax_ptr, row_outer_ptr, E, IS_TE)
        if HAS_COLUMNS:
            _store_outer_scales(column_amax_ptr, column_outer_ptr, E, IS_TE)


def amax_constants(rows: TwoLevelScaling | None, columns: TwoLevelScaling | None, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `amaxes_kernel`; a quantizer that is None gets no amaxes."""
    chosen = code_constants(rows, columns, target)
    return {name: value for name, value in chosen.items() if name in amaxes_kernel.arg_names}


def code_constants(rows: TwoLevelScaling | None, columns: TwoLevelScaling | None, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `codes_kernel`; a quantizer that is None gets no codes."""
    first, second = rows or columns, columns or rows
    assert first is not None, "rows, columns or both have a quantizer"
    assert second is not None, "rows, columns or both have a quantizer"
    return {**constants(first, second, target), "HAS_ROWS": rows is not None, "HAS_COLUMNS": columns is not None}


def _grid(rows: int, columns: int, groups: int) -> tuple[int, int]:
    """Return the launch grid for a matrix (rows, columns) in groups: programs along tokens and along columns.

    Along tokens, one tile more than the codes have covers rows after the last group.
    """
    tiles = rows // TILE_ROWS + groups + 1
    return tiles * (TILE_ROWS // (GROUPS * GROUP)), triton.cdiv(columns, COLUMNS)


def amaxes_of_groups(
    x: Tensor, offsets: Tensor | None, rows: TwoLevelScaling | None, columns: TwoLevelScaling | None, amaxes: Tensor
) -> Launch:
    """Return the launch of `amaxes_kernel`, which computes two amaxes of each of E groups of rows, or of all rows.

    ``amaxes`` is (2, E) float32: row 0 is for codes along rows, row 1 for codes along tokens; without a quantizer, a
    row is zeros. ``x`` has no size 0.
    """
    (r, k), groups = x.shape, 1 if offsets is None else offsets.shape[0]
    sizes = {"R": r, "K": k, "E": groups, "stride_m": x.stride(0), "stride_k": x.stride(1)}
    pointers = {"x_ptr": x, "offsets_ptr": offsets, "amaxes_ptr": amaxes}
    return Launch(
        kernel=amaxes_kernel,
        grid=lambda _: _grid(r, k, groups),
        arguments=pointers | sizes | amax_constants(rows, columns, target_of(x.device)),
        writes=("amaxes_ptr",),
        zeroed=("amaxes_ptr",),
        candidates=AMAX_CANDIDATES,
    )


def codes_of_groups(
    x: Tensor,
    offsets: Tensor,
    amaxes: Tensor,
    rows: TwoLevelScaling | None,
    columns: TwoLevelScaling | None,
    outputs: tuple[Tensor, ...],
) -> Launch:
    """Return the launch of `codes_kernel`, which writes codes, tiled scales and outer scales of E groups of rows.

    ``offsets`` are the ends of the groups of ``x``; ``amaxes``, (2, E), is the result of `amaxes_kernel`. ``outputs``
    receive the results of `fp8compile.ops.groups.group_quantize_two_levels`; nothing is written for a quantizer that
    is None.
    """
    (r, k), groups = x.shape, offsets.shape[0]
    names = tuple(f"{side}_ptr" for side in OUTPUTS)
    sizes = {"R": r, "K": k, "E": groups, "C": (r // TILE_ROWS + groups) * TILE_ROWS}
    strides = {"stride_m": x.stride(0), "stride_k": x.stride(1)}
    pointers = {"x_ptr": x, "offsets_ptr": offsets, "amaxes_ptr": amaxes, **dict(zip(names, outputs, strict=True))}
    wanted = (*[rows] * 3, *[columns] * 3)
    return Launch(
        kernel=codes_kernel,
        grid=lambda _: _grid(r, k, groups),
        arguments=pointers | sizes | strides | code_constants(rows, columns, target_of(x.device)),
        writes=tuple(name for name, quantizer in zip(names, wanted, strict=True) if quantizer is not None),
        candidates=CANDIDATES,
    )
