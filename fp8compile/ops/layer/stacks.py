"""What a rank has of a stack of matrices, such as the weights of experts, quantized as each matrix of the whole is.

    the stack (E, N, K) is cut along     amaxes of a matrix are
    E                                    those of the rank that has it
    N or K                               as of one matrix that is cut so, see `fp8compile.ops.layer.quantize_shard`

A grid of one value a block is (E, blocks, blocks): blocks never mix matrices. All matrices of a stack are quantized in
one step, as one tall matrix, whose blocks end where theirs do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.layer.local_shards import LocalShard, check_not_packed
from fp8compile.ops.layer.quantize_shard import Scales, scales_of
from fp8compile.ops.layer.shards import AxisBlocks, DimSharding, axis_blocks
from fp8compile.ops.outer_scale import outer_amax, two_scales
from fp8compile.quantizers import Quantizer, TwoLevelScaling

__all__ = [
    "cast_stack",
    "dequantize_stack",
    "in_whole_blocks",
    "outer_amaxes_of_stack",
    "scales_of_stack",
    "two_scales_of_stack",
    "whole_amax_of_stack",
]


def in_whole_blocks(stack: Tensor, rows: int) -> Tensor:
    """(E, N, K) with zeros behind each matrix, to the next multiple of ``rows``: no block has rows of two matrices."""
    missing = -stack.shape[1] % rows
    return pad(stack, (0, 0, 0, missing)) if missing else stack


def _tall(stack: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantizer]:
    """A stack in whole blocks, and what quantizes each of its matrices where all of them are one tall matrix."""
    rows, columns = quantizer.block
    if rows != -1:
        return in_whole_blocks(stack, rows), quantizer
    if stack.shape[1] == 0:  # a block has an amax, of nothing too
        stack = pad(stack, (0, 0, 0, 1))
    return stack, replace(quantizer, block=(stack.shape[1], columns))


def _cut_of_experts(part: LocalShard) -> DimSharding | None:
    return next((cut for cut in part.cuts if cut is not None and cut.dim == 0), None)


def _sides(part: LocalShard, quantizer: Quantizer) -> tuple[AxisBlocks, AxisBlocks]:
    """Rows and columns of each matrix."""
    cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in part.cuts if cut is not None and cut.dim > 0)
    check_not_packed(quantizer, quantizer.codes_shape(part.local.shape), part.local.shape)
    return axis_blocks(part.local.shape[1:], cuts, quantizer.block)


def _window(part: LocalShard, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    """The part, or where ranks cut blocks the part in whole blocks, with zeros around."""
    window = part.local
    for dim, side in enumerate(sides):
        window = side.embed(window, dim)
    return window


def whole_amax_of_stack(part: LocalShard, quantizer: Quantizer) -> Tensor:
    """What this rank knows of the amaxes of the whole stack: their maximum over all ranks is the amax of every block.

    Args:
        part: Of a stack.
        quantizer: Of each of its matrices.

    Returns:
        (E, blocks, blocks) of the whole stack, float32; 0 where this rank has no element of a block.
    """
    quantizer = quantizer.unpacked() or quantizer
    sides = _sides(part, quantizer)
    window = _window(part, sides)
    tall, own = _tall(window, quantizer)
    found = amax(tall.flatten(0, 1), own).view(window.shape[0], *quantizer.scale_shape(window.shape[1:]))
    for dim, side in enumerate(sides):
        found = found if side.block == -1 else side.widen(found, dim)
    if (cut := _cut_of_experts(part)) is not None:
        found = pad(found, (0, 0, 0, 0, cut.start, cut.total - cut.start - cut.length))
    return found


def scales_of_stack(amaxes: Tensor, quantizer: Quantizer, outer_amaxes: Tensor | None = None) -> Scales:
    """Multipliers and scales of each matrix of a stack, of two levels with an outer scale of each, (E,).

    Args:
        amaxes: (E, blocks, blocks) of the whole stack, float32.
        quantizer: Of each of its matrices.
        outer_amaxes: Of each matrix, (E,), if others have parts of it; else they are those of these blocks.
    """
    if not quantizer.has_outer_scale():
        return scales_of(amaxes, quantizer)
    if outer_amaxes is None:
        outer_amaxes = outer_amaxes_of_stack(amaxes, quantizer)
    return two_scales_of_stack(amaxes, outer_amaxes, quantizer)


def _is_elementwise(quantizer: Quantizer) -> bool:
    """Whether the rules of its two levels take an outer amax for each matrix; another package's take that of one."""
    return type(quantizer) is TwoLevelScaling


def outer_amaxes_of_stack(amaxes: Tensor, quantizer: Quantizer) -> Tensor:
    """The amax of each matrix of a stack, (E,) float32, from those of its blocks, (E, blocks, blocks)."""
    if _is_elementwise(quantizer) and amaxes.numel():
        return amaxes.amax((1, 2))
    return torch.cat([amaxes.new_empty(0), *(outer_amax(each, quantizer) for each in amaxes)])


def two_scales_of_stack(amaxes: Tensor, outer_amaxes: Tensor, quantizer: Quantizer) -> Scales:
    """Multipliers, scales and outer scales of a stack, from amaxes (E, blocks, blocks) and (E,)."""
    if not len(amaxes):
        return amaxes, amaxes.to(quantizer.scale_dtype()), outer_amaxes
    if _is_elementwise(quantizer):
        outer_amax = outer_amaxes.view(-1, 1, 1)
        outer_scale, scale = quantizer.outer_scale(outer_amax), quantizer.block_scale(amaxes, outer_amax)
        return quantizer.block_multiplier(scale, outer_scale), scale, outer_scale.flatten()
    pairs = zip(amaxes, outer_amaxes.split(1), strict=True)
    multipliers, scales, outer_scales = zip(*(two_scales(*pair, quantizer) for pair in pairs), strict=True)
    return torch.stack(multipliers), torch.stack(scales), torch.cat(outer_scales)


def cast_stack(part: LocalShard, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    """Codes of a part of a stack.

    Args:
        part: Of a stack.
        multiplier: (E, blocks, blocks) of the whole stack, float32.
        quantizer: Of each of its matrices.

    Returns:
        uint8, the shape of the part.
    """
    quantizer = quantizer.unpacked() or quantizer
    if (cut := _cut_of_experts(part)) is not None:
        multiplier = multiplier.narrow(0, cut.start, cut.length)
    return _by_blocks(part, multiplier, quantizer, cast)


def dequantize_stack(
    part: LocalShard, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, outer_scale: Tensor | None = None
) -> Tensor:
    """Values of a part of a stack: codes times scales in float32, rounded once.

    Args:
        part: Codes of a stack, uint8, one a byte.
        scale: (E, blocks, blocks), of all blocks of each matrix that ranks share.
        quantizer: Of each of its matrices.
        dtype: Of the result.
        outer_scale: (E,), of a quantizer of two levels.

    Returns:
        The shape of the part.
    """
    if outer_scale is None:
        return _by_blocks(part, scale, quantizer, partial(_dequantized, dtype=dtype))
    found = [part.local.new_empty((0, *part.local.shape[1:]), dtype=dtype)]
    for each in zip(part.local.split(1), scale.split(1), outer_scale.split(1), strict=True):
        codes, own, outer = each
        compute = partial(_dequantized, dtype=dtype, outer_scale=outer)
        found.append(_by_blocks(LocalShard(codes, part.cuts), own, quantizer, compute))
    return torch.cat(found)


def _dequantized(
    codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, outer_scale: Tensor | None = None
) -> Tensor:
    return dequantize(codes, scale, quantizer, dtype, *(() if outer_scale is None else (outer_scale,)))


def _by_blocks(
    part: LocalShard, grid: Tensor, quantizer: Quantizer, compute: Callable[[Tensor, Tensor, Quantizer], Tensor]
) -> Tensor:
    """What is computed of each element and of the value of its block in a grid (E, blocks, blocks)."""
    sides = _sides(part, quantizer)
    for dim, side in enumerate(sides):
        grid = grid if side.block == -1 else side.window(grid, dim + 1)
    window = _window(part, sides)
    tall, own = _tall(window, quantizer)
    matrix = tall.flatten(0, 1)
    found = compute(matrix, grid.reshape(own.scale_shape(matrix.shape)), own).view(tall.shape)
    found = found[:, : window.shape[1]]
    for dim, side in enumerate(sides):
        found = side.extract(found, dim + 1)
    return found
