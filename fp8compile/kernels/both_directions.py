"""Kernel that reads each matrix once, in tiles, and quantizes it twice: in blocks along rows and along columns.

Codes and scales have the bits of `CurrentScaling`. An amax is computed from the int32 bits of magnitudes, among which
NaN is the largest; `tl.max` of floats would ignore a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fp8compile.formats import E4M3, E5M2, FLOAT32_EXPONENT_MASK, FLOAT32_MANTISSA_BITS, FLOAT32_MAX, limit_of
from fp8compile.inductor import COUNTS, TileKernel, TileLaunch, TileMatrix
from fp8compile.kernels.counts import is_beyond, is_underflow, store_counts
from fp8compile.kernels.programs import TILE, several_programs, several_tile, tile_programs
from fp8compile.kernels.values import values, write
from fp8compile.quantizers import CurrentScaling

__all__ = [
    "BOTH",
    "WARPS",
    "along_columns",
    "both_directions",
    "both_kernel",
    "constants",
    "of_one_matrix",
    "tiles_of_several",
]

WARPS = 16  # a thread then has 120 registers on sm_90; with 8 warps it has 209
STRIP = 16  # columns that a program computes at once; in 32 or more the gradients of a feed-forward spill registers
SEVERAL_WARPS = 8  # a thread then has 255 registers for gradients of SwiGLU; with 16 warps it would spill some of 128
RULES = {"fp32": 0, "pow2": 1, "e8m0_rceil": 2, "e8m0_floor": 3}

MANTISSA_BITS = tl.constexpr(FLOAT32_MANTISSA_BITS)
EXPONENT_MASK = tl.constexpr(FLOAT32_EXPONENT_MASK)
MANTISSA_MASK = tl.constexpr((1 << FLOAT32_MANTISSA_BITS) - 1)
HALF = tl.constexpr(1 << (FLOAT32_MANTISSA_BITS - 1))
LARGEST = tl.constexpr(FLOAT32_MAX)
NAN_CODE = tl.constexpr(0x7F)
NAN_BITS = tl.constexpr(0x7FC00000)
LIMIT_E4M3, LIMIT_E5M2 = tl.constexpr(limit_of(E4M3)), tl.constexpr(limit_of(E5M2))
POW2, RCEIL, FLOOR = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power(byte):
    """Decode E8M0 bytes (int32, 0 to 254) to float32: 2**(byte - 127), which is subnormal for byte 0."""
    return _float(tl.where(byte == 0, HALF, byte << MANTISSA_BITS))


@triton.jit
def _scales(amax_bits, MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, RULE: tl.constexpr, EPS: tl.constexpr):
    """Compute multipliers (1 / scale) and stored scales from blocks' amaxes (int32 bits), as `scale_rules.py` does."""
    amax = _float(amax_bits)
    is_finite = amax_bits < EXPONENT_MASK
    floored = amax.to(tl.float64)
    if EPS > 0:
        floored = tl.where(floored < EPS, tl.full(floored.shape, EPS, tl.float64), floored)
    nan = _float(tl.full(amax.shape, NAN_BITS, tl.int32))
    if RULE == RCEIL or RULE == FLOOR:
        if RULE == RCEIL:
            bits = (floored.to(tl.float32) * (1.0 / MAX)).to(tl.int32, bitcast=True)
            exponent, mantissa = bits >> MANTISSA_BITS, bits & MANTISSA_MASK
            byte = exponent + tl.where(exponent == 0, mantissa > HALF, mantissa > 0).to(tl.int32)
        else:
            bits = floored.to(tl.float32).to(tl.int32, bitcast=True)
            byte = tl.maximum((bits >> MANTISSA_BITS) - MAX_EXPONENT, 0)
        multiplier = tl.where(is_finite, _power(254 - byte), nan)
        scale = tl.where(is_finite, byte, 255).to(tl.uint8)
    else:
        multiplier = tl.minimum((tl.full(floored.shape, MAX, tl.float64) / floored).to(tl.float32), LARGEST)
        if RULE == POW2:
            multiplier = _float(multiplier.to(tl.int32, bitcast=True) & EXPONENT_MASK)
        if EPS == 0:
            multiplier = tl.where(amax_bits == 0, 1.0, multiplier)
        multiplier = tl.where(is_finite, multiplier, nan)
        scale = (tl.full(multiplier.shape, 1.0, tl.float64) / multiplier.to(tl.float64)).to(tl.float32)
    return multiplier, scale


@triton.jit
def _to_odd(values):
    """Round float32 values to 7 mantissa bits, to odd: if a dropped bit is 1, the last kept bit becomes 1.

    Rounding the result to float8 gives the same code as rounding the value itself; see `fp8compile.formats`.
    """
    bits = values.to(tl.int32, bitcast=True)
    sticky = ((bits & 0xFFFF) + 0xFFFF) & 0x10000
    return _float((bits | sticky) & -0x10000)


def _rounds_once(_semantic: Any = None) -> Any:
    """Whether the target GPU converts float32 to float8 with one rounding: NVIDIA from sm_90 on.

    Read from the options of Triton's compiler (``_semantic``), because a forked process must not ask CUDA.
    """
    if _semantic is None:  # the interpreter has no compiler
        return cuda_capability_geq(9)
    architecture = str(_semantic.builder.options.arch)  # such as "sm90"; AMD's is "gfx950"
    return tl.constexpr(architecture.startswith("sm") and int(architecture[2:].rstrip("af")) >= 90)


_rounds_once.__triton_builtin__ = True  # type: ignore[attr-defined]  # else Triton would compile it


@triton.jit
def _encode(values, MAX: tl.constexpr, IS_E4M3: tl.constexpr):
    """Cast float32 values to float8 codes (uint8), e4m3 or e5m2: saturate, round to nearest even, NaN to 0x7F."""
    saturated = tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if not _rounds_once():
        saturated = _to_odd(saturated)
    if IS_E4M3:
        codes = saturated.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = saturated.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.where(values != values, NAN_CODE, codes).to(tl.uint8)


@triton.jit
def _value_of_scale(scale, RULE: tl.constexpr):
    """Decode stored scales to float32: E8M0 bytes if RULE is an E8M0 rule, otherwise no change."""
    if RULE == RCEIL or RULE == FLOOR:
        return _power(scale.to(tl.int32))
    else:  # noqa: RET505  # Triton compiles what is behind a return too, and asks for one type
        return scale


@triton.jit
def _bits(x):
    """Return the magnitudes of values as int32 bits."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _underflow(magnitude, codes):
    """Count the codes that are 0 although their values are not."""
    return tl.sum(is_underflow(magnitude, codes, 0x7F).to(tl.int32))


@triton.jit
def _saturation(magnitude, scale, IS_E4M3: tl.constexpr, RULE: tl.constexpr):
    """Count the values beyond the largest code by more than half a step; only the rule FLOOR allows any."""
    if RULE == FLOOR:
        beyond = is_beyond(magnitude, _value_of_scale(scale, RULE), LIMIT_E4M3 if IS_E4M3 else LIMIT_E5M2)
        return tl.sum(beyond.to(tl.int32))
    else:  # noqa: RET505  # as above; by other rules no amax is beyond the largest code
        return 0


@triton.jit
def both_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, M, K, stride_m, stride_k,
    TILE: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize one tile of a matrix along rows and along columns; elements beyond M and K count as 0.

    A tile is computed in strips of STRIP columns, which limits the number of registers. TILE equals STRIP or BLOCK.
    If R_RULE is None, the tile is quantized along columns only.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    before = tl.program_id(2).to(tl.int64) * M  # number of rows in the matrices before this one
    all_rows = M * tl.num_programs(2)
    first_m, first_k = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    m = first_m + tl.arange(0, TILE)

    # each matrix
    strips = ()
    row_amax = tl.zeros((TILE, BLOCKS), tl.int32)
    for strip in tl.static_range(TILE // STRIP):
        k = first_k + strip * STRIP + tl.arange(0, STRIP)
        is_inside = (m[:, None] < M) & (k[None, :] < K)
        row, column = (before + m)[:, None], k[None, :]
        x = values(x_ptr, row, column, is_inside, stride_m, stride_k)
        strips += (x,)
        row_amax = tl.maximum(row_amax, tl.max(tl.reshape(_bits(x), (TILE, BLOCKS, STRIP // BLOCKS)), 2))

    if R_RULE is not None:
        row_multiplier, row_scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
        block = first_k // BLOCK + tl.arange(0, BLOCKS)
        is_block = (m[:, None] < M) & (block[None, :] * BLOCK < K)
        tl.store(row_scales_ptr + (before + m)[:, None] + block[None, :] * all_rows, row_scale, is_block)
    if counts_ptr is not None:
        row_underflow, row_saturation, column_underflow, column_saturation = 0, 0, 0, 0
    block = first_m // BLOCK + tl.arange(0, BLOCKS)
    block_before = tl.program_id(2).to(tl.int64) * tl.cdiv(M, BLOCK)
    for strip in tl.static_range(TILE // STRIP):
        k = first_k + strip * STRIP + tl.arange(0, STRIP)
        is_inside = (m[:, None] < M) & (k[None, :] < K)
        row, column = (before + m)[:, None], k[None, :]
        x = strips[strip]
        if R_RULE is not None:
            spread = tl.broadcast_to(row_multiplier[:, :, None], (TILE, BLOCKS, STRIP // BLOCKS))
            codes = _encode(x * tl.reshape(spread, (TILE, STRIP)), R_MAX, R_E4M3)
            write(rows_ptr, row, column, codes, is_inside, K)
            if counts_ptr is not None:
                scales = tl.broadcast_to(row_scale[:, :, None], (TILE, BLOCKS, STRIP // BLOCKS))
                row_underflow += _underflow(_bits(x), codes)
                row_saturation += _saturation(_bits(x), tl.reshape(scales, (TILE, STRIP)), R_E4M3, R_RULE)
        column_amax = tl.max(tl.reshape(_bits(x), (BLOCKS, BLOCK, STRIP)), 1)
        multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
        spread = tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, STRIP))
        codes = _encode(x * tl.reshape(spread, (TILE, STRIP)), C_MAX, C_E4M3)
        at_column = columns_ptr + before * K + k[:, None] * M + m[None, :]
        tl.store(at_column, tl.trans(codes), (k[:, None] < K) & (m[None, :] < M))
        if counts_ptr is not None:
            scales = tl.broadcast_to(scale[:, None, :], (BLOCKS, BLOCK, STRIP))
            column_underflow += _underflow(_bits(x), codes)
            column_saturation += _saturation(_bits(x), tl.reshape(scales, (TILE, STRIP)), C_E4M3, C_RULE)
        is_block = (block[:, None] * BLOCK < M) & (k[None, :] < K)
        tl.store(column_scales_ptr + (block_before + block)[:, None] * K + k[None, :], scale, is_block)
    if counts_ptr is not None:
        amax = tl.max(row_amax)
        if R_RULE is not None:
            store_counts(counts_ptr, 0, amax, row_underflow, row_saturation)
        store_counts(counts_ptr, 0 if R_RULE is None else 1, amax, column_underflow, column_saturation)


BOTH = TileKernel(
    both_kernel,
    inputs=(),
    outputs=("row_scales_ptr", "columns_ptr", "column_scales_ptr"),
    sizes=("M", "K"),
    tile=("TILE", "STRIP"),
    of_matrix=tuple(f"{side}_{name}" for side in "RC" for name in ("MAX", "EXPONENT", "E4M3", "RULE", "EPS")),
)
BOTH_COUNTED = replace(BOTH, outputs=(*BOTH.outputs, COUNTS))


def constants(rows: CurrentScaling | None, columns: CurrentScaling) -> dict[str, object]:
    """Return a kernel's compile-time constants for a tile quantized along columns and, unless None, along rows."""
    return {"TILE": TILE, "BLOCK": columns.block[0], **_of_direction("R", rows), **_of_direction("C", columns)}


def of_one_matrix(rows: CurrentScaling | None, columns: CurrentScaling) -> dict[str, object]:
    """Return the compile-time constants of `both_kernel` for contiguous input, one matrix or several stacked."""
    return {"STRIP": TILE, "stride_k": 1, **constants(rows, columns)}


def _of_direction(prefix: str, quantizer: CurrentScaling | None) -> dict[str, object]:
    if quantizer is None:
        return {f"{prefix}_{name}": None for name in ("MAX", "EXPONENT", "E4M3", "RULE", "EPS")}
    fmt = quantizer.element_format()
    return {
        f"{prefix}_MAX": fmt.max,
        f"{prefix}_EXPONENT": fmt.max_exponent,
        f"{prefix}_E4M3": fmt == E4M3,
        f"{prefix}_RULE": RULES[quantizer.scale],
        f"{prefix}_EPS": float(quantizer.eps),
    }


def both_directions(
    x: Tensor,
    rows: CurrentScaling,
    columns: CurrentScaling,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    counts: Tensor | None = None,
) -> None:
    """Launch `both_kernel`, which writes ``outputs`` in the layouts of `fp8compile.ops.quantize_both`.

    Args:
        x: (M, K), or stacked matrices (E, M, K), contiguous, float32, bfloat16 or float16; no size is 0.
        rows: Quantizer along rows, block (1, n), n a divisor of 128.
        columns: Quantizer along columns, block (n, 1).
        outputs: Codes and scales along rows, then codes and scales along columns.
        counts: Receives the statistics that `fp8compile.ops.counting_kernels` describes; None to compute none.
    """
    *_, m, k = x.shape
    chosen = of_one_matrix(rows, columns)
    both_kernel[tile_programs(x.shape)](x, *outputs, m, k, k, **chosen, counts_ptr=counts, num_warps=WARPS)


def along_columns(
    x: Tensor, quantizer: CurrentScaling, outputs: tuple[Tensor, Tensor], counts: Tensor | None = None
) -> None:
    """Launch `both_kernel` to quantize along columns only.

    Args:
        x: (M, K), or stacked matrices (E, M, K), contiguous, float32, bfloat16 or float16; no size is 0.
        quantizer: Block (n, 1), n a divisor of 128.
        outputs: Codes (K, M) and scales (ceil(M / n), K), of each matrix.
        counts: Receives the statistics that `fp8compile.ops.counting_kernels` describes; None to compute none.
    """
    *_, m, k = x.shape
    chosen, grid = of_one_matrix(None, quantizer), tile_programs(x.shape)
    both_kernel[grid](x, None, None, *outputs, m, k, k, **chosen, counts_ptr=counts, num_warps=WARPS)


def tiles_of_several(
    shape: Sequence[int], pairs: Sequence[tuple[CurrentScaling | None, CurrentScaling]], *, counts: bool
) -> TileLaunch:
    """Return the launch of `both_kernel` for generated code that computes and quantizes several matrices by tiles.

    Args:
        shape: Rows and columns of each matrix.
        pairs: For each matrix, the quantizers along rows and along columns, with blocks (1, n) and (n, 1), n a divisor
            of 128. With None along rows, a matrix gets codes along columns only; the first matrix has both quantizers.
        counts: Whether each matrix has statistics (`fp8compile.ops.counting_kernels`) as its last result.
    """
    (m, k), block = shape, pairs[0][1].block[0]
    matrices = tuple(
        TileMatrix(
            {**_of_direction("R", rows), **_of_direction("C", columns)},
            ("rows_ptr", "row_scales_ptr") if rows is None else (),
        )
        for rows, columns in pairs
    )
    tile = several_tile(block)
    shared = {"TILE": tile, "STRIP": STRIP if tile == block else tile, "BLOCK": block}
    kernel = BOTH_COUNTED if counts else BOTH
    grid = several_programs(shape, block)
    return TileLaunch(kernel, grid, {"M": m, "K": k}, shared, SEVERAL_WARPS, matrices)
