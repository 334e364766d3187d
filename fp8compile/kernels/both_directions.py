"""Kernel that reads each matrix once, in tiles, and quantizes it twice: in blocks along rows and along columns.

Codes and scales have the bits of `CurrentScaling`. An amax is computed from the int32 bits of magnitudes, among which
NaN is the largest; `tl.max` of floats would ignore a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.formats import E4M3, FLOAT32_EXPONENT_MASK, FLOAT32_MANTISSA_BITS, FLOAT32_MAX
from fp8compile.kernels.launch import Launch
from fp8compile.kernels.programs import TILE, tile_programs
from fp8compile.quantizers import CurrentScaling
from fp8compile.target import Target, target_of

__all__ = [
    "CANDIDATES",
    "both_directions",
    "both_kernel",
    "constants",
    "rounds_once",
]

CANDIDATES = tuple(Config({}, num_warps=warps) for warps in (16, 8))  # on sm_90, 120 and 209 registers
RULES = {"fp32": 0, "pow2": 1, "e8m0_rceil": 2, "e8m0_floor": 3}

MANTISSA_BITS = tl.constexpr(FLOAT32_MANTISSA_BITS)
EXPONENT_MASK = tl.constexpr(FLOAT32_EXPONENT_MASK)
MANTISSA_MASK = tl.constexpr((1 << FLOAT32_MANTISSA_BITS) - 1)
HALF = tl.constexpr(1 << (FLOAT32_MANTISSA_BITS - 1))
LARGEST = tl.constexpr(FLOAT32_MAX)
NAN_CODE = tl.constexpr(0x7F)
NAN_BITS = tl.constexpr(0x7FC00000)
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
    """Compute multipliers (1 / scale) and stored scales from blocks' amaxes (int32 bits), as `scale_rules.py` does.

    Float64 only if there is an eps, which need not be a float32; `tl.div_rn` has the bits of float64, rounded.
    """
    amax = _float(amax_bits)
    is_finite = amax_bits < EXPONENT_MASK
    floored = amax
    if EPS > 0:
        floored = tl.where(amax.to(tl.float64) < EPS, tl.full(amax.shape, EPS, tl.float64), amax.to(tl.float64))
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
        if EPS > 0:
            multiplier = (tl.full(amax.shape, MAX, tl.float64) / floored).to(tl.float32)
        else:
            multiplier = tl.div_rn(tl.full(amax.shape, MAX, tl.float32), floored)
        multiplier = tl.minimum(multiplier, LARGEST)
        if RULE == POW2:
            multiplier = _float(multiplier.to(tl.int32, bitcast=True) & EXPONENT_MASK)
        if EPS == 0:
            multiplier = tl.where(amax_bits == 0, 1.0, multiplier)
        multiplier = tl.where(is_finite, multiplier, nan)
        scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), multiplier)
    return multiplier, scale


@triton.jit
def _to_odd(values):
    """Round float32 values to 7 mantissa bits, to odd: if a dropped bit is 1, the last kept bit becomes 1.

    Rounding the result to float8 gives the same code as rounding the value itself; see `fp8compile.formats`.
    """
    bits = values.to(tl.int32, bitcast=True)
    sticky = ((bits & 0xFFFF) + 0xFFFF) & 0x10000
    return _float((bits | sticky) & -0x10000)


def rounds_once(target: Target) -> bool:
    """Whether a GPU converts float32 to float8 itself: NVIDIA from sm_90 on, by ``cvt.rn.satfinite``.

    The instruction rounds once, saturates, and converts NaN to 0x7F. So does Triton's interpreter, on a CPU.
    """
    return target.type == "cpu" or (target.hip is None and target.capability >= (9, 0))


@triton.jit
def _encode(values, MAX: tl.constexpr, IS_E4M3: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """Cast float32 values to float8 codes (uint8), e4m3 or e5m2: saturate, round to nearest even, NaN to 0x7F.

    For ROUNDS_ONCE see `rounds_once`; a kernel must not ask CUDA, because it is compiled in a forked process.
    """
    FLOAT8: tl.constexpr = tl.float8e4nv if IS_E4M3 else tl.float8e5
    if ROUNDS_ONCE:
        codes = values.to(FLOAT8).to(tl.uint8, bitcast=True)
    else:
        saturated = _to_odd(tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL))
        codes = tl.where(values != values, NAN_CODE, saturated.to(FLOAT8).to(tl.uint8, bitcast=True)).to(tl.uint8)
    return codes


@triton.jit
def _bits(x):
    """Return the magnitudes of values as int32 bits."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def both_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, M, K, stride_m, stride_k,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a matrix along rows and along columns; elements beyond M and K count as 0.

    If R_RULE is None, the tile is quantized along columns only.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    before = tl.program_id(2).to(tl.int64) * M  # number of rows in the matrices before this one
    all_rows = M * tl.num_programs(2)
    first_m, first_k = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    m, k = first_m + tl.arange(0, TILE), first_k + tl.arange(0, TILE)
    is_inside = (m[:, None] < M) & (k[None, :] < K)
    row, column = (before + m)[:, None], k[None, :]
    x = tl.load(x_ptr + row * stride_m + column * stride_k, is_inside, other=0.0).to(tl.float32)

    if R_RULE is not None:
        row_amax = tl.max(tl.reshape(_bits(x), (TILE, BLOCKS, BLOCK)), 2)
        row_multiplier, row_scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
        block = first_k // BLOCK + tl.arange(0, BLOCKS)
        is_block = (m[:, None] < M) & (block[None, :] * BLOCK < K)
        tl.store(row_scales_ptr + (before + m)[:, None] + block[None, :] * all_rows, row_scale, is_block)
        spread = tl.broadcast_to(row_multiplier[:, :, None], (TILE, BLOCKS, BLOCK))
        codes = _encode(x * tl.reshape(spread, (TILE, TILE)), R_MAX, R_E4M3, ROUNDS_ONCE)
        tl.store(rows_ptr + row * K + column, codes, is_inside)

    column_amax = tl.max(tl.reshape(_bits(x), (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE))
    codes = _encode(x * tl.reshape(spread, (TILE, TILE)), C_MAX, C_E4M3, ROUNDS_ONCE)
    at_column = columns_ptr + before * K + k[:, None] * M + m[None, :]
    tl.store(at_column, tl.trans(codes), (k[:, None] < K) & (m[None, :] < M))
    block = first_m // BLOCK + tl.arange(0, BLOCKS)
    block_before = tl.program_id(2).to(tl.int64) * tl.cdiv(M, BLOCK)
    is_block = (block[:, None] * BLOCK < M) & (k[None, :] < K)
    tl.store(column_scales_ptr + (block_before + block)[:, None] * K + k[None, :], scale, is_block)


def constants(rows: CurrentScaling | None, columns: CurrentScaling, target: Target) -> dict[str, object]:
    """Return a kernel's compile-time constants for a tile quantized along columns and, unless None, along rows."""
    directions = _of_direction("R", rows, target) | _of_direction("C", columns, target)
    return {"TILE": TILE, "BLOCK": columns.block[0], **directions}


def _of_direction(prefix: str, quantizer: CurrentScaling | None, target: Target) -> dict[str, object]:
    if quantizer is None:
        return {f"{prefix}_{name}": None for name in ("MAX", "EXPONENT", "E4M3", "RULE", "EPS")}
    fmt = quantizer.element_format()
    return {
        f"{prefix}_MAX": fmt.max,
        f"{prefix}_EXPONENT": fmt.max_exponent,
        f"{prefix}_E4M3": fmt == E4M3,
        f"{prefix}_RULE": RULES[quantizer.scale],
        f"{prefix}_EPS": float(quantizer.eps),
        "ROUNDS_ONCE": rounds_once(target),
    }


def both_directions(
    x: Tensor, rows: CurrentScaling | None, columns: CurrentScaling, outputs: tuple[Tensor | None, ...]
) -> Launch:
    """Return the launch of `both_kernel`, which writes ``outputs`` in the layouts of `fp8compile.ops.cast_transpose`.

    Args:
        x: (M, K), or stacked matrices (E, M, K), contiguous, float32, bfloat16 or float16; no size is 0.
        rows: Quantizer along rows, block (1, n), n a divisor of 128; None to quantize along columns only.
        columns: Quantizer along columns, block (n, 1).
        outputs: Codes and scales along rows, or None, then codes and scales along columns.
    """
    *_, m, k = x.shape
    names = ("rows_ptr", "row_scales_ptr", "columns_ptr", "column_scales_ptr")
    pointers = dict(zip(names, outputs, strict=True))
    return Launch(
        kernel=both_kernel,
        grid=lambda _: tile_programs(x.shape),
        arguments={"x_ptr": x, **pointers, "M": m, "K": k, "stride_m": k, "stride_k": 1}
        | constants(rows, columns, target_of(x.device)),
        writes=names if rows is not None else names[2:],
        candidates=CANDIDATES,
    )
