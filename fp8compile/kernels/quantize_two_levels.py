"""Kernel that reads a matrix once, and makes four-bit codes along rows and along columns.

A Triton program loads four groups of sixteen rows as sixteen tensors; tensor i has row i of each group. So one thread
holds sixteen rows of a column, whose sums and codes need no shared memory. Codes and scales have the bits of
`TwoLevelScaling`, except for codes that a GPU's own instruction rounds (`fp8compile.kernels.stochastic_cvt`). Scales
are in tiles (`fp8compile.scale_layouts`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.formats import (
    E2M1,
    E4M3,
    FLOAT32_BIAS,
    FLOAT32_EXPONENT_MASK,
    FLOAT32_MANTISSA_BITS,
    FLOAT32_MAX,
    FLOAT32_NAN,
)
from fp8compile.kernels.both_directions import _encode, _float
from fp8compile.kernels.launch import Launch
from fp8compile.kernels.programs import PACKED_COLUMNS, PACKED_ROWS, packed_programs
from fp8compile.kernels.stochastic_cvt import BY_HASH, BY_INSTRUCTION, _four_codes, _in_fours, rounding_of
from fp8compile.quantizers import TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.quantizers.stochastic_rounding import FRACTION_BITS, SEED_STEP
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS
from fp8compile.target import Target, target_of

__all__ = ["CANDIDATES", "OUTPUTS", "both_packed", "both_packed_kernel", "constants"]

GROUPS, COLUMNS = PACKED_ROWS // GROUP, PACKED_COLUMNS  # a program has 4 groups of 16 rows, and 128 columns
CANDIDATES = (Config({}, num_warps=8),)
# names of the pointers that a kernel writes to, without "_ptr"
OUTPUTS = ("rows", "row_scales", "row_outer", "columns", "column_scales", "column_outer")

SIXTEEN = tl.constexpr(GROUP)
MASK, NAN_BITS = tl.constexpr(0xFFFFFFFF), tl.constexpr(FLOAT32_NAN)
LARGEST_CODE = tl.constexpr(E2M1.max)
LARGEST_SCALE = tl.constexpr(E4M3.max)
LARGEST = tl.constexpr(FLOAT32_MAX)
SIXTH = tl.constexpr(float.fromhex("0x1.555556p-3"))  # 1 / 6 in float32
SMALLEST_SCALE = tl.constexpr(2.0**-6)
BIAS = tl.constexpr(FLOAT32_BIAS)
MANTISSA_BITS = tl.constexpr(FLOAT32_MANTISSA_BITS)
EXPONENT_MASK = tl.constexpr(FLOAT32_EXPONENT_MASK)
STEP = tl.constexpr(SEED_STEP)
DROPPED_BITS = tl.constexpr(32 - FRACTION_BITS)
FRACTION = tl.constexpr(2.0**-FRACTION_BITS)
ROWS_OF_TILE, BLOCKS_OF_TILE = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_BLOCKS)


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _magnitude(values):
    return _bits(values) & 0x7FFFFFFF


@triton.jit
def _quotient(a, b):
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)


@triton.jit
def _inverse(x):
    return _quotient(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _at_most(values, most):
    """Return the smaller of each value and ``most``; NaN stays."""
    return tl.where(values > most, most, values)


@triton.jit
def _decoded(scale):
    return scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _outer_multiplier(outer_amax):
    """Compute TransformerEngine's multiplier 6 * 448 / amax, at most the largest float32; NaN for inf and NaN."""
    largest = tl.full(outer_amax.shape, LARGEST_CODE * LARGEST_SCALE, tl.float32)
    found = _at_most(_quotient(largest, outer_amax), LARGEST)
    return tl.where(_bits(outer_amax) < EXPONENT_MASK, found, _float(tl.full(outer_amax.shape, NAN_BITS, tl.int32)))


@triton.jit
def _outer_scale(outer_amax, IS_TE: tl.constexpr):
    if IS_TE:
        return _inverse(_outer_multiplier(outer_amax))
    found = _quotient(outer_amax, tl.full(outer_amax.shape, LARGEST_CODE * LARGEST_SCALE, tl.float32))
    found = tl.where(found == 0, 1.0, found)
    return tl.where(_bits(outer_amax) < EXPONENT_MASK, found, _float(tl.full(outer_amax.shape, NAN_BITS, tl.int32)))


@triton.jit
def _scales(amax, outer, IS_TE: tl.constexpr):
    """Compute multipliers (1 / scale) and e4m3 scales from blocks' amaxes, as `quantizers/two_level_rules.py` does."""
    first, second = outer
    if IS_TE:
        scale = _encode(amax * first, LARGEST_SCALE, IS_E4M3=True, ROUNDS_ONCE=False)
        multiplier = _at_most(_inverse(_decoded(scale) * second), LARGEST)
    else:
        scaled = _quotient(_quotient(amax, tl.full(amax.shape, LARGEST_CODE, tl.float32)), first)
        scale = _encode(
            tl.where(scaled < SMALLEST_SCALE, SMALLEST_SCALE, scaled), LARGEST_SCALE, IS_E4M3=True, ROUNDS_ONCE=False
        )
        multiplier = _quotient(second, _decoded(scale))
    return multiplier, scale


@triton.jit
def _outer(outer_amax, IS_TE: tl.constexpr):
    """Compute the pair that `_scales` takes as ``outer``, from the amax of the whole tensor.

    With IS_TE (TransformerEngine's rule): a factor for the blocks' amaxes, and the outer scale. Otherwise (torchao's):
    the outer scale, and its inverse.
    """
    outer_scale = _outer_scale(outer_amax, IS_TE)
    if IS_TE:
        return _outer_multiplier(outer_amax) * SIXTH, outer_scale
    return outer_scale, _at_most(_inverse(outer_scale), LARGEST)


@triton.jit
def _mixed(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def _noise(values, position, SEED: tl.constexpr):
    """Compute noise in [0, 1) for values at ``position`` in the matrix, as `stochastic_rounding.py` does."""
    h = _word(values.to(tl.uint32, bitcast=True), position, SEED)
    return (h >> DROPPED_BITS).to(tl.int32).to(tl.float32) * FRACTION


@triton.jit
def _word(bits, position, SEED: tl.constexpr):
    start: tl.constexpr = (SEED * STEP) & MASK
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    return _mixed(_mixed(low + start) ^ high ^ bits)


@triton.jit
def _four_rounded(a, b, c, d, position, SEED: tl.constexpr):
    """Round neighbours a, b, c, d (``a`` at ``position``) by the GPU's instruction; return four codes in an int64."""
    bits = a.to(tl.uint32, bitcast=True)  # combines the bits of all four values, so that their order matters
    bits = bits * 3 + b.to(tl.uint32, bitcast=True)
    bits = bits * 3 + c.to(tl.uint32, bitcast=True)
    bits = bits * 3 + d.to(tl.uint32, bitcast=True)
    return _four_codes(a, b, c, d, _word(bits, position, SEED)).to(tl.int64) & 0xFFFF


@triton.jit
def _to_a_neighbour(values, noise):
    """Round each value to the e2m1 number above or below it; ``noise`` in [0, 1) decides."""
    saturated = tl.clamp(values, -LARGEST_CODE, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    field = (_bits(saturated) & EXPONENT_MASK) >> MANTISSA_BITS
    exponent = tl.maximum(field, BIAS) - 1 - BIAS
    per_unit, unit = _float((-exponent + BIAS) << MANTISSA_BITS), _float((exponent + BIAS) << MANTISSA_BITS)
    in_units = _float(_magnitude(saturated)) * per_unit
    lower = in_units.to(tl.int32).to(tl.float32)
    rounded = (lower + (noise < in_units - lower).to(tl.float32)) * unit
    return _float(_bits(rounded) | (_bits(saturated) & -0x80000000))


@triton.jit
def _products(x, multiplier, IS_TE: tl.constexpr):
    """Multiply values by their multipliers (1 / scale). With IS_TE (TransformerEngine's rule), zeros become +0."""
    values = x * multiplier
    if IS_TE:
        values = tl.where(x == 0, 0.0, values)
    return values


@triton.jit
def _codes(values, position, ROUNDING: tl.constexpr, SEED: tl.constexpr):
    """Round multiplied values to e2m1 codes, as int32 from 0 to 15; NaN gets 0. ROUNDING is NEAREST or BY_HASH."""
    rounded = _to_a_neighbour(values, _noise(values, position, SEED)) if ROUNDING == BY_HASH else values
    magnitude = _at_most(_float(_magnitude(rounded)), LARGEST_CODE)
    bits = _bits(magnitude)
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    small = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code = tl.where(magnitude < 1, small, large) | ((_bits(rounded) >> 28) & 8)
    return tl.where(values == values, code, 0)


@triton.jit
def _place_in_tiles(row, block, blocks):
    """Return the index of the scale at (``row``, ``block``) in the layout of 128 x 4 tiles of scales."""
    tile = (row // ROWS_OF_TILE) * tl.cdiv(blocks, BLOCKS_OF_TILE) + block // BLOCKS_OF_TILE
    inside = (row % 32) * 16 + (row % ROWS_OF_TILE // 32) * 4 + block % BLOCKS_OF_TILE
    return tile * (ROWS_OF_TILE * BLOCKS_OF_TILE) + inside


@triton.jit
def _is_negative(i: tl.constexpr, j: tl.constexpr, NEGATIVE: tl.constexpr):
    """Whether term i of sum j of the Hadamard transform is subtracted; bit i of NEGATIVE is sign i."""
    both = i & j
    both = both ^ (both >> 2)
    return ((both ^ (both >> 1)) & 1) ^ ((NEGATIVE >> i) & 1)


@triton.jit
def _sum(xs, j: tl.constexpr, TRANSFORM: tl.constexpr, NEGATIVE: tl.constexpr):
    """Return sum j of the Hadamard transform of rows ``xs`` with the signs NEGATIVE; row j without TRANSFORM."""
    if TRANSFORM:
        total = xs[0] * (-0.25 if _is_negative(0, j, NEGATIVE) else 0.25)
        for i in tl.static_range(1, SIXTEEN):
            total += xs[i] * (-0.25 if _is_negative(i, j, NEGATIVE) else 0.25)
        return total
    return xs[j]


@triton.jit
def _packed_rows(x, position, outer, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr):
    """Quantize blocks of 16 values, (rows, blocks, 16); return each block's codes as one int64, and its scale."""
    multiplier, scale = _scales(_float(tl.max(_magnitude(x), 2)), outer, IS_TE)
    values = _products(x, multiplier[:, :, None], IS_TE)
    if ROUNDING == BY_INSTRUCTION:
        a, b, c, d = _in_fours(values)
        first, _, _, _ = _in_fours(position)
        codes = _four_rounded(a, b, c, d, first, SEED)
        return tl.sum(codes << (16 * tl.arange(0, 4)[None, None, :].to(tl.int64)), 2), scale
    codes = _codes(values, position, ROUNDING, SEED).to(tl.int64)
    return tl.sum(codes << (4 * tl.arange(0, SIXTEEN)[None, None, :].to(tl.int64)), 2), scale


@triton.jit
def _words(codes_ptr):
    return codes_ptr.to(tl.pointer_type(tl.int64), bitcast=True)  # of sixteen codes


@triton.jit
def _quantized_rows(
    x, m, k, M, K, codes_ptr, scales_ptr, outer,
    COLUMNS: tl.constexpr, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr,
):  # fmt: skip
    """Quantize rows ``m`` in blocks of 16, and store codes and scales."""
    BLOCKS: tl.constexpr = COLUMNS // SIXTEEN
    split: tl.constexpr = (x.shape[0], BLOCKS, SIXTEEN)
    x, position = tl.reshape(x, split), tl.reshape(m[:, None] * K + k[None, :], split)
    packed, scale = _packed_rows(x, position, outer, IS_TE, ROUNDING, SEED)
    block, blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), K // SIXTEEN
    is_inside = (m[:, None] < M) & (block[None, :] < blocks)
    tl.store(_words(codes_ptr) + m[:, None] * blocks + block[None, :], packed, is_inside)
    _store_scales(scales_ptr, scale, m[:, None], block[None, :], M, blocks)


@triton.jit
def _store_scales(scales_ptr, scale, row, block, rows, blocks):
    """Store scales of a grid (``rows``, ``blocks``) in tiles of 128 x 4; fill the rest of the last tiles with 0."""
    is_tile = (row < tl.cdiv(rows, ROWS_OF_TILE) * ROWS_OF_TILE) & (
        block < tl.cdiv(blocks, BLOCKS_OF_TILE) * BLOCKS_OF_TILE
    )
    filled = tl.where((row < rows) & (block < blocks), scale, 0).to(tl.uint8)
    tl.store(scales_ptr + _place_in_tiles(row, block, blocks), filled, is_tile)


@triton.jit
def _packed_columns(
    xs, row, k, K, outer,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr,
    TRANSFORM: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize sixteen rows ``xs``, a block in each column; return each block's codes as one int64, and its scale."""
    amax = tl.zeros((GROUPS, COLUMNS), tl.int32)
    for j in tl.static_range(SIXTEEN):
        amax = tl.maximum(amax, _magnitude(_sum(xs, j, TRANSFORM, NEGATIVE)))
    multiplier, scale = _scales(_float(amax), outer, IS_TE)
    packed = tl.zeros((GROUPS, COLUMNS), tl.int64)
    if ROUNDING == BY_INSTRUCTION:
        for j in tl.static_range(0, SIXTEEN, 4):
            a = _products(_sum(xs, j, TRANSFORM, NEGATIVE), multiplier, IS_TE)
            b = _products(_sum(xs, j + 1, TRANSFORM, NEGATIVE), multiplier, IS_TE)
            c = _products(_sum(xs, j + 2, TRANSFORM, NEGATIVE), multiplier, IS_TE)
            d = _products(_sum(xs, j + 3, TRANSFORM, NEGATIVE), multiplier, IS_TE)
            position = (row + j).to(tl.int64)[:, None] * K + k[None, :]
            packed |= _four_rounded(a, b, c, d, position, SEED) << (4 * j)
    else:
        for j in tl.static_range(SIXTEEN):
            position = (row + j).to(tl.int64)[:, None] * K + k[None, :]
            values = _products(_sum(xs, j, TRANSFORM, NEGATIVE), multiplier, IS_TE)
            packed |= _codes(values, position, ROUNDING, SEED).to(tl.int64) << (4 * j)
    return packed, scale


@triton.jit
def _columns(
    xs, group, k, M, K, codes_ptr, scales_ptr, outer,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr, ROUNDING: tl.constexpr, SEED: tl.constexpr,
    TRANSFORM: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize with `_packed_columns`; store codes and scales transposed."""
    packed, scale = _packed_columns(
        xs, group * SIXTEEN, k, K, outer, GROUPS, COLUMNS, IS_TE, ROUNDING, SEED, TRANSFORM, NEGATIVE
    )
    groups = M // SIXTEEN
    is_inside = (k[:, None] < K) & (group[None, :] < groups)
    tl.store(_words(codes_ptr) + k[:, None] * groups + group[None, :], tl.trans(packed), is_inside)
    _store_scales(scales_ptr, tl.trans(scale), k[:, None], group[None, :], K, groups)


@triton.jit
def both_packed_kernel(
    x_ptr, row_amax_ptr, column_amax_ptr,
    rows_ptr, row_scales_ptr, row_outer_ptr, columns_ptr, column_scales_ptr, column_outer_ptr, M, K,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, IS_TE: tl.constexpr,
    R_ROUNDING: tl.constexpr, R_SEED: tl.constexpr,
    C_ROUNDING: tl.constexpr, C_SEED: tl.constexpr, C_TRANSFORM: tl.constexpr, C_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of an (M, K) matrix along rows and along columns; M and K are multiples of 16.

    A tile has GROUPS * 16 rows and COLUMNS columns; elements beyond M and K count as 0. IS_TE chooses
    TransformerEngine's rule of scales; R_* and C_* describe the quantizers along rows and columns.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    k = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (group[:, None] * SIXTEEN < M) & (k[None, :] < K)
    at = x_ptr + group[:, None] * SIXTEEN * K + k[None, :]
    xs = ()
    for i in tl.static_range(SIXTEEN):
        xs += (tl.load(at + i * K, is_inside, other=0.0).to(tl.float32),)
    column_amax = tl.load(column_amax_ptr)
    _columns(
        xs, group, k, M, K, columns_ptr, column_scales_ptr, _outer(column_amax, IS_TE),
        GROUPS, COLUMNS, IS_TE, C_ROUNDING, C_SEED, C_TRANSFORM, C_NEGATIVE,
    )  # fmt: skip

    row_amax = tl.load(row_amax_ptr)
    outer = _outer(row_amax, IS_TE)
    for i in range(SIXTEEN):  # not unrolled: loads hit the cache, and the code is sixteen times shorter
        x = tl.load(at + i * K, is_inside, other=0.0).to(tl.float32)
        _quantized_rows(
            x, group * SIXTEEN + i, k, M, K, rows_ptr, row_scales_ptr, outer,
            COLUMNS, IS_TE, R_ROUNDING, R_SEED,
        )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(row_outer_ptr, _outer_scale(row_amax, IS_TE))
        tl.store(column_outer_ptr, _outer_scale(column_amax, IS_TE))


def constants(rows: TwoLevelScaling, columns: TwoLevelScaling, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `both_packed_kernel` for two quantizers and the device ``target``."""
    return {
        "GROUPS": GROUPS,
        "COLUMNS": COLUMNS,
        "IS_TE": rows.scale == "transformer_engine",
        "R_ROUNDING": rounding_of(rows, target),
        "R_SEED": rows.seed,
        "C_ROUNDING": rounding_of(columns, target),
        "C_SEED": columns.seed,
        "C_TRANSFORM": bool(columns.hadamard),
        "C_NEGATIVE": sum(1 << i for i, sign in enumerate(columns.hadamard) if sign < 0),
    }


def both_packed(
    x: Tensor,
    outer_amaxes: tuple[Tensor, Tensor],
    rows: TwoLevelScaling,
    columns: TwoLevelScaling,
    outputs: tuple[Tensor, ...],
) -> Launch:
    """Return the launch of `both_packed_kernel`, which quantizes ``x`` in blocks (1, 16) and (16, 1).

    Sizes of ``x`` are multiples of 16, and not 0. ``outer_amaxes`` are the whole tensor's amaxes for codes along rows
    and along columns; they differ if columns get a Hadamard transform. ``outputs`` are codes, tiled scales and outer
    scale along rows, then the same along columns.
    """
    names = tuple(f"{side}_ptr" for side in OUTPUTS)
    pointers = {"x_ptr": x, "row_amax_ptr": outer_amaxes[0], "column_amax_ptr": outer_amaxes[1]}
    sizes = {"M": x.shape[0], "K": x.shape[1], **constants(rows, columns, target_of(x.device))}
    return Launch(
        kernel=both_packed_kernel,
        grid=lambda _: packed_programs(x.shape),
        arguments=pointers | dict(zip(names, outputs, strict=True)) | sizes,
        writes=names,
        candidates=CANDIDATES,
    )
