"""Kernels for groups of rows (tokens): amaxes of groups, a cast to transposed codes, and both steps in one.

Transposed codes, (K, C), have a column for each token. Each group's columns are padded with codes 0 to a multiple of
``ALIGN`` (`fp8compile.ops.groups.padding`). Rows after the last group are never loaded. Wrong offsets give wrong
results, but no access outside the tensors. Codes and scales have the bits of `CurrentScaling`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.kernels.both_directions import TILE, _encode, _of_direction, _scales
from fp8compile.kernels.launch import Launch
from fp8compile.quantizers import CurrentScaling
from fp8compile.target import Target, target_of

__all__ = [
    "AMAX_CANDIDATES",
    "CAST_CANDIDATES",
    "amax_constants",
    "amax_kernel",
    "amax_of_groups",
    "cast_constants",
    "cast_groups",
    "cast_kernel",
    "quantize_constants",
    "quantize_groups",
    "quantize_kernel",
]

SEARCHED = tl.constexpr(32)  # groups that a loop step searches; one step for all groups would need too many registers
AMAX_CANDIDATES = tuple(Config({}, num_warps=warps) for warps in (8, 4))
CAST_CANDIDATES = tuple(Config({}, num_warps=warps) for warps in (16, 8))


@triton.jit
def _sizes(offsets_ptr, e, E):
    start = tl.load(offsets_ptr + e - 1, (e > 0) & (e < E), other=0)
    return tl.maximum(tl.load(offsets_ptr + e, e < E, other=0) - start, 0)


@triton.jit
def _groups_ended(offsets_ptr, row, E):
    """Return how many of E groups end at or before a row; ``offsets_ptr`` points to the groups' ends."""
    count = 0
    for first in range(0, E, SEARCHED):
        e = first + tl.arange(0, SEARCHED)
        ends = tl.load(offsets_ptr + e, e < E, other=0)
        count += tl.sum(((e < E) & (ends <= row)).to(tl.int32), 0)
    return count


@triton.jit
def amax_kernel(
    x_ptr, offsets_ptr, amax_ptr, R, K, E, stride_m, stride_k,
    TILE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Update the amaxes of E groups of rows with one tile, TILE x TILE, of ``x``, (R, K), atomically.

    A group has one amax if IS_WHOLE, otherwise one for each of the K columns.
    """
    first = tl.program_id(0) * TILE
    m, k = first + tl.arange(0, TILE), tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_token = m < tl.minimum(tl.load(offsets_ptr + E - 1), R)
    at = m.to(tl.int64)[:, None] * stride_m + k[None, :] * stride_k
    x = tl.load(x_ptr + at, is_token[:, None] & (k[None, :] < K), other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)  # nonnegative floats order like their bits
    last = tl.minimum(_groups_ended(offsets_ptr, first + TILE - 1, E), E - 1)
    for group in range(_groups_ended(offsets_ptr, first, E), last + 1):
        start = tl.load(offsets_ptr + group - 1, group > 0, other=0)
        is_inside = (m >= start) & (m < tl.load(offsets_ptr + group))
        largest = tl.max(tl.where(is_inside[:, None], magnitude, 0), 0)
        if IS_WHOLE:
            tl.atomic_max(bits_ptr + group, tl.max(largest, 0), sem="relaxed")
        else:
            tl.atomic_max(bits_ptr + group * K + k, largest, k < K, sem="relaxed")


@triton.jit
def _units(offsets_ptr, first, E, ALIGN: tl.constexpr, UNITS: tl.constexpr):
    """Return the group of each run of ALIGN transposed columns, UNITS runs from column ``first`` on; E for no group.

    For each run, also return the row of x that its first column holds, and the row at which its group ends.
    """
    unit = first + tl.arange(0, UNITS) * ALIGN
    group, padding, columns = tl.zeros((UNITS,), tl.int32), tl.zeros((UNITS,), tl.int32), 0
    for first_e in range(0, E, SEARCHED):
        e = first_e + tl.arange(0, SEARCHED)
        size = _sizes(offsets_ptr, e, E)
        padded = (size + (ALIGN - 1)) // ALIGN * ALIGN
        is_behind = (unit[:, None] >= columns + tl.cumsum(padded, 0)[None, :]) & (e < E)[None, :]
        group += tl.sum(is_behind.to(tl.int32), 1)
        padding += tl.sum(tl.where(is_behind, padded - size, 0), 1)
        columns += tl.sum(padded, 0)
    return group, unit - padding, tl.load(offsets_ptr + group, group < E, other=0)


@triton.jit
def _rows(row, end, R, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Return the row of x for each transposed column, and a mask, False for padding, from two results of `_units`."""
    m = row[:, None] + tl.arange(0, ALIGN)[None, :]
    is_row = tl.reshape((m < end[:, None]) & (m < R), (TILE, 1))
    return tl.reshape(m, (TILE, 1)).to(tl.int64), is_row


@triton.jit
def _transposed(codes, is_token, first, k, K, C, TILE: tl.constexpr):
    """Return row and column indices, the transposed tile of codes (0 for padding), and the mask to store the tile."""
    at, column = tl.trans(k), first + tl.arange(0, TILE)[None, :]
    return at, column, tl.trans(tl.where(is_token, codes, 0).to(tl.uint8)), (at < K) & (column < C)


@triton.jit
def cast_kernel(
    x_ptr, offsets_ptr, multiplier_ptr, codes_ptr, R, K, E, C, stride_m, stride_k, multiplier_stride_m,
    multiplier_stride_k,
    TILE: tl.constexpr, ALIGN: tl.constexpr,
    Q_MAX: tl.constexpr, Q_E4M3: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """Cast one tile of ``x``, (R, K), with the multipliers (1 / scale) of its groups, to transposed codes (K, C).

    C is the number of columns after padding each group to a multiple of ALIGN. Constants Q_* describe the quantizer.
    """
    UNITS: tl.constexpr = TILE // ALIGN
    first = tl.program_id(0) * TILE
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    group, row, end = _units(offsets_ptr, first, E, ALIGN, UNITS)
    m, is_token = _rows(row, end, R, ALIGN, TILE)
    is_inside = is_token & (k < K)
    x = tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)
    of_group = group.to(tl.int64)[:, None] * multiplier_stride_m + k * multiplier_stride_k
    multiplier = tl.load(multiplier_ptr + of_group, (group[:, None] < E) & (k < K), other=0.0)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (UNITS, ALIGN, TILE)), (TILE, TILE))
    encoded = _encode(x * spread, Q_MAX, Q_E4M3, ROUNDS_ONCE)
    at, column, codes, is_stored = _transposed(encoded, is_token, first, k, K, C, TILE)
    tl.store(codes_ptr + at * C + column, codes, is_stored)


@triton.jit
def quantize_kernel(
    x_ptr, offsets_ptr, codes_ptr, scales_ptr, R, K, E, C, stride_m, stride_k,
    TILE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    Q_MAX: tl.constexpr, Q_EXPONENT: tl.constexpr, Q_E4M3: tl.constexpr, Q_RULE: tl.constexpr, Q_EPS: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of ``x``, (R, K), in blocks of BLOCK tokens, to transposed codes (K, C).

    C is the number of columns after padding each group to a multiple of ALIGN. Constants Q_* describe the quantizer.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    first = tl.program_id(0) * TILE
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    _, row, end = _units(offsets_ptr, first, E, ALIGN, TILE // ALIGN)
    m, is_token = _rows(row, end, R, ALIGN, TILE)
    is_inside = is_token & (k < K)
    x = tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.reshape(magnitude, (BLOCKS, BLOCK, TILE)), 1)
    multiplier, scale = _scales(amax, Q_MAX, Q_EXPONENT, Q_RULE, Q_EPS)
    spread = tl.reshape(tl.broadcast_to(multiplier[:, None, :], (BLOCKS, BLOCK, TILE)), (TILE, TILE))
    block = first // BLOCK + tl.arange(0, BLOCKS).to(tl.int64)[:, None]
    tl.store(scales_ptr + block * K + k, scale, (block * BLOCK < C) & (k < K))
    encoded = _encode(x * spread, Q_MAX, Q_E4M3, ROUNDS_ONCE)
    at, column, codes, is_stored = _transposed(encoded, is_token, first, k, K, C, TILE)
    tl.store(codes_ptr + at * C + column, codes, is_stored)


def amax_constants(quantizer: CurrentScaling) -> dict[str, object]:
    """Return the compile-time constants of `amax_kernel` for a quantizer with the block (-1, -1) or (-1, 1)."""
    return {"TILE": TILE, "IS_WHOLE": quantizer.block[1] == -1}


def cast_constants(quantizer: CurrentScaling, align: int, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `cast_kernel`; groups start at multiples of ``align`` columns."""
    fmt = _of_direction("Q", quantizer, target)
    return {"TILE": TILE, "ALIGN": align} | {name: fmt[name] for name in ("Q_MAX", "Q_E4M3", "ROUNDS_ONCE")}


def quantize_constants(quantizer: CurrentScaling, align: int, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `quantize_kernel`; groups start at multiples of ``align`` columns."""
    return {"TILE": TILE, "ALIGN": align, "BLOCK": quantizer.block[0], **_of_direction("Q", quantizer, target)}


def _of_tokens(x: Tensor, offsets: Tensor) -> dict[str, object]:
    (rows, k), strides = x.shape, x.stride()
    sizes = {"R": rows, "K": k, "E": offsets.shape[0], "stride_m": strides[0], "stride_k": strides[1]}
    return {"x_ptr": x, "offsets_ptr": offsets, **sizes}


def amax_of_groups(x: Tensor, offsets: Tensor, quantizer: CurrentScaling, amax: Tensor) -> Launch:
    """Return the launch of `amax_kernel`, which writes the amax of each of E groups of rows of ``x`` to ``amax``.

    ``x`` is (R, K) with any strides and no size 0; ``offsets``, (E,) int32, are the ends of the groups. ``amax`` is
    contiguous float32: (E, 1) for the block (-1, -1) of ``quantizer``, otherwise (E, K).
    """
    return Launch(
        kernel=amax_kernel,
        grid=lambda _: (triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE)),
        arguments=_of_tokens(x, offsets) | {"amax_ptr": amax} | amax_constants(quantizer),
        writes=("amax_ptr",),
        zeroed=("amax_ptr",),
        candidates=AMAX_CANDIDATES,
    )


def cast_groups(
    x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: CurrentScaling, align: int, codes: Tensor
) -> Launch:
    """Return the launch of `cast_kernel`: groups of rows of ``x``, (R, K), to transposed ``codes``, (K, C).

    ``offsets``, (E,) int32, are the ends of the groups. ``multiplier`` (1 / scale) is (E, K) or (E, 1). Each group
    begins at a multiple of ``align`` columns, a divisor of 128. ``codes`` is contiguous; ``x`` and ``multiplier`` have
    any strides; no size is 0.
    """
    k, columns = codes.shape
    strides = multiplier.expand(offsets.shape[0], k).stride()
    named = {"C": columns, "multiplier_stride_m": strides[0], "multiplier_stride_k": strides[1]}
    pointers = {"multiplier_ptr": multiplier, "codes_ptr": codes}
    return Launch(
        kernel=cast_kernel,
        grid=lambda _: (triton.cdiv(columns, TILE), triton.cdiv(k, TILE)),
        arguments=_of_tokens(x, offsets) | pointers | named | cast_constants(quantizer, align, target_of(x.device)),
        writes=("codes_ptr",),
        candidates=CAST_CANDIDATES,
    )


def quantize_groups(
    x: Tensor, offsets: Tensor, quantizer: CurrentScaling, align: int, codes: Tensor, scale: Tensor
) -> Launch:
    """Return the launch of `quantize_kernel`: transposed ``codes``, (K, C), and ``scale``, (C / n, K), of ``x``.

    ``x`` is (R, K); ``offsets``, (E,) int32, are the ends of its groups of rows. Blocks are (n, 1), n a divisor of
    128. Each group begins at a multiple of ``align`` columns, a divisor of 128 and a multiple of n. Results are
    contiguous; no size is 0.
    """
    k, columns = codes.shape
    pointers = {"codes_ptr": codes, "scales_ptr": scale, "C": columns}
    return Launch(
        kernel=quantize_kernel,
        grid=lambda _: (triton.cdiv(columns, TILE), triton.cdiv(k, TILE)),
        arguments=_of_tokens(x, offsets) | pointers | quantize_constants(quantizer, align, target_of(x.device)),
        writes=("codes_ptr", "scales_ptr"),
        candidates=CAST_CANDIDATES,
    )
