"""Kernel that reads each matrix once, by tiles of 128 x 128, and makes codes along rows and along columns.

Codes and scales have the bits of `CurrentScaling`. `tl.max` drops a NaN, so the amax is computed on the int32 bits of
magnitudes: they have the same order as the magnitudes, and NaN is the largest.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fp8compile.formats import E4M3, E5M2, FLOAT32_EXPONENT_MASK, FLOAT32_MANTISSA_BITS, FLOAT32_MAX, limit_of
from fp8compile.kernels.counts import is_beyond, is_underflow, store_counts
from fp8compile.kernels.programs import TILE, tile_programs
from fp8compile.quantizers import CurrentScaling

__all__ = ["WARPS", "both_directions", "both_kernel", "constants"]

WARPS = 16  # a thread then has 120 registers on sm_90; with 8 warps it has 209
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
    """2**(byte - 127); a subnormal number if the byte is 0."""
    return _float(tl.where(byte == 0, HALF, byte << MANTISSA_BITS))


@triton.jit
def _scales(amax_bits, MAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, RULE: tl.constexpr, EPS: tl.constexpr):
    """The multiplier and the stored scale of each block, by the rules of `quantizers/scale_rules.py`."""
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
    """Cut values to 7 mantissa bits and set the last one if any other was 1, as in `fp8compile.formats`."""
    bits = values.to(tl.int32, bitcast=True)
    sticky = ((bits & 0xFFFF) + 0xFFFF) & 0x10000
    return _float((bits | sticky) & -0x10000)


def _rounds_once(_semantic: Any = None) -> Any:
    """Whether the GPU that a kernel is compiled for converts float32 to float8 with one rounding: from sm_90 on.

    `triton.language.target_info` asks CUDA, which a forked process may not do, and Inductor compiles in forked
    processes. The compiler's options know the GPU without CUDA.
    """
    if _semantic is None:  # the interpreter has no compiler
        return cuda_capability_geq(9)
    architecture = str(_semantic.builder.options.arch)  # such as "sm90"; AMD's is "gfx950"
    return tl.constexpr(architecture.startswith("sm") and int(architecture[2:].rstrip("af")) >= 90)


_rounds_once.__triton_builtin__ = True  # type: ignore[attr-defined]  # else Triton would compile it


@triton.jit
def _encode(values, MAX: tl.constexpr, IS_E4M3: tl.constexpr):
    """Encode values: saturated, rounded to nearest even, with one code for NaN."""
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
    """The float32 that a stored scale stands for."""
    if RULE == RCEIL or RULE == FLOOR:
        return _power(scale.to(tl.int32))
    return scale


@triton.jit
def _store_counts(
    counts_ptr, direction: tl.constexpr, magnitude, codes, scale, IS_E4M3: tl.constexpr, RULE: tl.constexpr
):
    """Count the codes of one tile; ``scale`` are the stored scales of its blocks, broadcast to the tile's shape."""
    underflow = is_underflow(magnitude, codes, 0x7F)
    beyond = is_beyond(magnitude, _value_of_scale(scale, RULE), LIMIT_E4M3 if IS_E4M3 else LIMIT_E5M2)
    store_counts(counts_ptr, direction, tl.max(magnitude), tl.sum(underflow.to(tl.int32)), tl.sum(beyond.to(tl.int32)))


@triton.jit
def both_kernel(
    x_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr, M, K,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    C_MAX: tl.constexpr, C_EXPONENT: tl.constexpr, C_E4M3: tl.constexpr, C_RULE: tl.constexpr, C_EPS: tl.constexpr,
    counts_ptr=None,
):  # fmt: skip
    """Quantize one tile of one matrix; rows beyond M and columns beyond K count as zeros, which change no amax."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    before = tl.program_id(2).to(tl.int64) * M  # number of rows in the matrices before this one
    first_m, first_k = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(1).to(tl.int64) * TILE
    m, k = first_m + tl.arange(0, TILE), first_k + tl.arange(0, TILE)
    is_inside = (m[:, None] < M) & (k[None, :] < K)
    at = (before + m)[:, None] * K + k[None, :]
    x = tl.load(x_ptr + at, is_inside, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    row_amax = tl.max(tl.reshape(magnitude, (TILE, BLOCKS, BLOCK)), 2)
    multiplier, scale = _scales(row_amax, R_MAX, R_EXPONENT, R_RULE, R_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
    codes = _encode(x * spread, R_MAX, R_E4M3)
    tl.store(rows_ptr + at, codes, is_inside)
    if counts_ptr is not None:
        scales = tl.reshape(tl.broadcast_to(scale[:, :, None], (TILE, BLOCKS, BLOCK)), (TILE, TILE))
        _store_counts(counts_ptr, 0, magnitude, codes, scales, R_E4M3, R_RULE)
    block = first_k // BLOCK + tl.arange(0, BLOCKS)
    is_block = (m[:, None] < M) & (block[None, :] * BLOCK < K)
    all_rows = M * tl.num_programs(2)
    tl.store(row_scales_ptr + (before + m)[:, None] + block[None, :] * all_rows, scale, is_block)

    column_amax = tl.max(tl.reshape(magnitude, (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(column_amax, C_MAX, C_EXPONENT, C_RULE, C_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    codes = _encode(x * spread, C_MAX, C_E4M3)
    at_column = columns_ptr + before * K + k[:, None] * M + m[None, :]
    tl.store(at_column, tl.trans(codes), (k[:, None] < K) & (m[None, :] < M))
    if counts_ptr is not None:
        scales = tl.reshape(tl.broadcast_to(scale[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
        _store_counts(counts_ptr, 1, magnitude, codes, scales, C_E4M3, C_RULE)
    block = first_m // BLOCK + tl.arange(0, BLOCKS)
    is_block = (block[:, None] * BLOCK < M) & (k[None, :] < K)
    block += tl.program_id(2).to(tl.int64) * tl.cdiv(M, BLOCK)
    tl.store(column_scales_ptr + block[:, None] * K + k[None, :], scale, is_block)


def constants(rows: CurrentScaling, columns: CurrentScaling) -> dict[str, object]:
    """Compile-time constants of `both_kernel`."""
    return {"TILE": TILE, "BLOCK": rows.block[1], **_of_direction("R", rows), **_of_direction("C", columns)}


def _of_direction(prefix: str, quantizer: CurrentScaling) -> dict[str, object]:
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
    """Launch the kernel. The results are written to ``outputs``, in the layouts of `fp8compile.ops.quantize_both`.

    Args:
        x: (M, K), or a stack of matrices (E, M, K), contiguous, float32, bfloat16 or float16; no size is 0.
        rows: Quantizer along rows, block (1, n), n a divisor of 128.
        columns: Quantizer along columns, block (n, 1).
        outputs: Codes and scales along rows, then along columns.
        counts: `fp8compile.ops.counting_kernels` of both directions, to be written; None to count nothing.
    """
    *_, m, k = x.shape
    chosen = constants(rows, columns)
    both_kernel[tile_programs(x.shape)](x, *outputs, m, k, **chosen, counts_ptr=counts, num_warps=WARPS)
