"""The steps of quantization for what this rank has of a matrix or of a stack of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.layer import quantize_shard, stacks
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.quantize_shard import Scales
from fp8compile.ops.layer.shards import Sharding, axis_blocks
from fp8compile.ops.outer_scale import outer_amax
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["cast_shard", "dequantize_shard", "outer_amax_of", "scales_of", "whole_amax"]


def whole_amax(part: LocalShard, batch: int, quantizer: Quantizer) -> Tensor:
    """What this rank knows of the amaxes of all blocks of the whole."""
    return (stacks.whole_amax_of_stack if batch else quantize_shard.whole_amax)(part, quantizer)


def outer_amax_of(amaxes: Tensor, batch: int, quantizer: Quantizer) -> Tensor:
    """The amax of a matrix, or of each one of a stack, from those of its blocks."""
    return (stacks.outer_amaxes_of_stack if batch else outer_amax)(amaxes, quantizer)


def scales_of(amaxes: Tensor, batch: int, quantizer: Quantizer, outer_amax: Tensor | None = None) -> Scales:
    """Multipliers, scales and outer scales from the amaxes of blocks, and of matrices if ranks know them."""
    if batch:
        return stacks.scales_of_stack(amaxes, quantizer, outer_amax)
    return quantize_shard.scales_of(amaxes, quantizer, outer_amax=outer_amax)


def cast_shard(part: LocalShard, batch: int, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    """Codes of a part, one a byte, by the multipliers of all blocks of the whole."""
    return (stacks.cast_stack if batch else quantize_shard.cast_shard)(part, multiplier, quantizer)


def dequantize_shard(
    codes: Tensor,
    cuts: Sharding,
    batch: int,
    scale: Tensor,
    quantizer: Quantizer,
    dtype: torch.dtype,
    outer_scale: Tensor | None,
) -> Tensor:
    """Values of a part, by the scales of all blocks that ranks cut."""
    if batch:
        return stacks.dequantize_stack(LocalShard(codes, cuts), scale, quantizer, dtype, outer_scale)
    shape, scale = codes.shape, scale.reshape(-1, scale.shape[-1])
    is_column = int(cuts[0].dim == len(shape) - 1)
    side = axis_blocks(shape, cuts, quantizer.block)[is_column]
    window = side.embed(as_matrix(codes), is_column), side.window(scale, is_column)
    outer = () if outer_scale is None else (outer_scale,)
    return side.extract(dequantize(*window, quantizer, dtype, *outer), is_column).reshape(shape)
