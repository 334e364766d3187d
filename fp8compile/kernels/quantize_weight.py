"""Kernels that read a weight once: make codes for the forward, and amaxes for the cast in the backward.

    group_rows_kernel   each row    --amax--> multiplier --> codes, scale; also updates the amax of each column
    tiles_kernel        128 x 128   --amax of each square block--> multipliers --> codes, scales; also stores amaxes

Codes and scales have the bits of `CurrentScaling`. Atomic maxima make column amaxes the same in any order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from fp8compile.kernels.both_directions import _encode, _of_direction, _scales
from fp8compile.kernels.launch import Launch
from fp8compile.kernels.programs import TILE, tile_programs
from fp8compile.quantizers import CurrentScaling
from fp8compile.target import Target, target_of

__all__ = ["CANDIDATES", "square_blocks", "tile_constants", "tiles_kernel"]

CANDIDATES = tuple(Config({}, num_warps=warps) for warps in (16, 8))


@triton.jit
def tiles_kernel(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, M, K,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
    R_MAX: tl.constexpr, R_EXPONENT: tl.constexpr, R_E4M3: tl.constexpr, R_RULE: tl.constexpr, R_EPS: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
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
    codes = _encode(x * tl.reshape(spread, (TILE, TILE)), R_MAX, R_E4M3, ROUNDS_ONCE)
    tl.store(codes_ptr + m[:, None] * K + k[None, :], codes, is_inside)
    block_m, block_k = first_m // BLOCK + tl.arange(0, BLOCKS), first_k // BLOCK + tl.arange(0, BLOCKS)
    is_block = (block_m[:, None] * BLOCK < M) & (block_k[None, :] * BLOCK < K)
    at = block_m[:, None] * tl.cdiv(K, BLOCK) + block_k[None, :]
    tl.store(scales_ptr + at, scale, is_block)
    tl.store(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, amax, is_block)


def tile_constants(quantizer: CurrentScaling, target: Target) -> dict[str, object]:
    """Return the compile-time constants of `tiles_kernel` for a quantizer with a square block."""
    return {"TILE": TILE, "BLOCK": quantizer.block[0], **_of_direction("R", quantizer, target)}


def square_blocks(x: Tensor, quantizer: CurrentScaling, outputs: tuple[Tensor, Tensor, Tensor]) -> Launch:
    """Return the launch of `tiles_kernel`, which writes codes, scales and amaxes of square blocks.

    The quantizer's block is (n, n), n a divisor of 128. ``x`` is (M, K), contiguous, with no size 0.
    """
    names = ("codes_ptr", "scales_ptr", "amax_ptr")
    pointers = {"x_ptr": x, **dict(zip(names, outputs, strict=True))}
    return Launch(
        kernel=tiles_kernel,
        grid=lambda _: tile_programs(x.shape),
        arguments=pointers | {"M": x.shape[0], "K": x.shape[1]} | tile_constants(quantizer, target_of(x.device)),
        writes=names,
        candidates=CANDIDATES,
    )
