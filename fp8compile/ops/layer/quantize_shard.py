"""Quantize what a rank has of a tensor as the whole tensor would be: by the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.ops.amax import amax
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer.local_shards import LocalShard, QuantizedShard, check_not_packed
from fp8compile.ops.layer.shards import AxisBlocks, Sharding, axis_blocks, split_axes
from fp8compile.ops.quantization_steps import OPS_OF_STEPS, PYTHON_OF_STEPS, Steps
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import as_matrix

Scales = tuple[Tensor, Tensor, Tensor | None]  # multiplier, scale, and of two levels the outer scale

__all__ = [
    "OPS_OF_STEPS",
    "PYTHON_OF_STEPS",
    "Scales",
    "Steps",
    "cast_shard",
    "is_aligned",
    "local_scales",
    "positions",
    "quantize_shard",
    "scales_of",
    "shard_amax",
    "whole_amax",
]


def _window(part: LocalShard, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    """The part, or where it cuts blocks the matrix of it in whole blocks, with zeros around."""
    if all(side.kind != "split" for side in sides):
        return part.local
    window = as_matrix(part.local)
    for dim, side in enumerate(sides):
        window = side.embed(window, dim) if side.kind == "split" else window
    return window


def _extracted(codes: Tensor, part: LocalShard, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    """The part's own codes, of those of its window."""
    if all(side.kind != "split" for side in sides):
        return codes
    for dim, side in enumerate(sides):
        codes = side.extract(codes, dim) if side.kind == "split" else codes
    return codes.reshape(part.local.shape)


def shard_amax(part: LocalShard, quantizer: Quantizer) -> Tensor:
    """The amax of the blocks of a part, over all ranks that have elements of them: see `quantize_shard`."""
    return _window_and_amax(part, quantizer, OPS_OF_STEPS)[1]


def _check_part(part: LocalShard, quantizer: Quantizer) -> None:
    if any(part.cuts):
        check_not_packed(quantizer, quantizer.codes_shape(part.local.shape), part.local.shape)


def _check_transform(part: LocalShard, quantizer: Quantizer) -> None:
    """Raise a ValueError if neighbours that are transformed together lie on several ranks, or are too few."""
    if not (group := len(quantizer.transform())):
        return
    tokens = quantizer.block[0] == group
    side = axis_blocks(part.local.shape, part.cuts, quantizer.block)[0 if tokens else 1]
    if side.kind == "split" or not _compat.statically_true(side.total % group == 0):  # on all ranks or on none
        raise ValueError(
            f"a layer on ranks transforms {'tokens' if tokens else 'features'} {group} at a time, and this rank has "
            f"{side.length} of {side.total}. Let each rank have multiples of {group}, or take a recipe without a "
            "transform, as fp8compile.recipes.nvfp4(hadamard=()) is."
        )


def _window_and_amax(
    part: LocalShard, quantizer: Quantizer, steps: Steps, local_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[AxisBlocks, AxisBlocks]]:
    _check_part(part, quantizer)
    return _window_and_amax_over_ranks(part.local, local_amax, part.cuts, quantizer, steps.amax)


# Ranks make their windows by other ops, or none. Shared as one, forward and backward send alike on all of them.
@inductor.once_a_graph
def _window_and_amax_over_ranks(
    local: Tensor, local_amax: Tensor | None, cuts: Sharding, quantizer: Quantizer, amax: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, tuple[AxisBlocks, AxisBlocks]]:
    part, sides = LocalShard(local, cuts), axis_blocks(local.shape, cuts, quantizer.block)
    window = _window(part, sides)
    found = amax(window, quantizer) if local_amax is None else local_amax
    for dim, side in enumerate(sides):
        found = side.widen(found, dim) if side.kind == "split" else found
    for group in dict.fromkeys(group for side in sides if side.kind != "aligned" for group in side.groups):
        found = found if group is None else all_reduce_amax(found, group)
    return window, found, sides


def positions(part: LocalShard, quantizer: Quantizer) -> tuple[Tensor, ...]:
    """Rows and columns of a part in the whole, as `fp8compile.ops.cast` takes them, if codes depend on them."""
    return _where(axis_blocks(part.local.shape, part.cuts, quantizer.block), quantizer, part)


def _where(sides: tuple[AxisBlocks, AxisBlocks], quantizer: Quantizer, part: LocalShard) -> tuple[Tensor, ...]:
    """Where the window's rows and columns are in the whole, for codes that depend on it."""
    if quantizer.is_local():
        return ()
    rows, columns = (side.window_positions(part.local.device) for side in sides)
    return rows * sides[1].total, columns


def scales_of(
    found: Tensor,
    quantizer: Quantizer,
    steps: Steps = OPS_OF_STEPS,
    cuts: Sharding = (),
    outer_amax: Tensor | None = None,
) -> Scales:
    """Multiplier, scale and outer scale from the amaxes of blocks.

    Args:
        found: ``quantizer.scale_shape`` of the whole matrix or of a part.
        quantizer: How.
        steps: By which steps.
        cuts: Of the part: of two levels ranks reduce the outer amax first. () of a whole matrix.
        outer_amax: Of the whole, if ranks know it already: then they reduce none.
    """
    if not quantizer.has_outer_scale():
        return *steps.scale(found, quantizer), None
    if outer_amax is None:
        outer_amax = steps.outer_amax(found, quantizer)
        for cut in cuts:
            outer_amax = outer_amax if cut is None else all_reduce_amax(outer_amax, cut.group)
    return steps.two_scales(found, outer_amax, quantizer)


def is_aligned(part: LocalShard, quantizer: Quantizer) -> bool:
    """Whether all blocks that a part has elements of are its own, so that ranks need not talk to quantize it."""
    return not any(part.cuts) or all(
        side.kind == "aligned" for side in axis_blocks(part.local.shape, part.cuts, quantizer.block)
    )


def quantize_shard(
    part: LocalShard,
    quantizer: Quantizer,
    steps: Steps = OPS_OF_STEPS,
    *,
    local_amax: Tensor | None = None,
    whole_amax: Tensor | None = None,
) -> QuantizedShard:
    """Quantize a part as the whole tensor would be, by the same codes and scales.

    Args:
        part: All ranks of its groups call this with theirs.
        quantizer: How.
        steps: By which steps.
        local_amax: Amaxes of the part's own elements, where no block is cut, if they are known.
        whole_amax: Amaxes of all blocks of the whole, if they are known: then ranks exchange none.

    Returns:
        Codes of the part's elements.
    """
    if not any(part.cuts):
        if part.cuts:  # what ranks may yet cut, or send, is not packed
            quantizer = quantizer.unpacked() or quantizer
            _check_transform(part, quantizer)
        quantizer = quantizer.for_shape(part.local.shape)
        amax = whole_amax if whole_amax is not None else local_amax
        amax = steps.amax(part.local, quantizer) if amax is None else amax
        multiplier, scales, outer = scales_of(amax, quantizer, steps)
        codes = steps.cast(part.local, multiplier, quantizer)
        return QuantizedShard(codes, scales, quantizer, part.cuts, outer_scale=outer)
    quantizer = quantizer.unpacked() or quantizer
    _check_transform(part, quantizer)
    if whole_amax is not None:
        return _by_whole_amax(part, quantizer, steps, whole_amax)
    window, found, sides = _window_and_amax(part, quantizer, steps, local_amax)
    multiplier, scales, outer = scales_of(found, quantizer, steps, part.cuts)
    for dim, side in enumerate(sides):
        multiplier = side.window(multiplier, dim) if side.kind == "split" else multiplier
    codes = _extracted(steps.cast(window, multiplier, quantizer, *_where(sides, quantizer, part)), part, sides)
    return QuantizedShard(codes, scales, quantizer, part.cuts, _are_split(part, quantizer), outer)


def _are_split(part: LocalShard, quantizer: Quantizer) -> tuple[bool, bool]:
    return split_axes(part.local.shape, part.cuts, quantizer.block)


def local_scales(scales: Tensor, shape: Sequence[int], cuts: Sharding, quantizer: Quantizer) -> Tensor:
    """Scales of a rank's part, of those of the whole tensor; along an axis that splits blocks all of them.

    Args:
        scales: ``quantizer.scale_shape`` of the whole matrix.
        shape: Of the rank's part.
        cuts: Of the tensor.
        quantizer: Its quantizer.
    """
    for dim, side in enumerate(axis_blocks(shape, cuts, quantizer.block)):
        scales = side.window(scales, dim) if side.kind == "aligned" and side.block != -1 else scales
    return scales


def _by_whole_amax(part: LocalShard, quantizer: Quantizer, steps: Steps, whole_amax: Tensor) -> QuantizedShard:
    multiplier, scales, outer = scales_of(whole_amax, quantizer, steps)
    scales = local_scales(scales, part.local.shape, part.cuts, quantizer)
    codes = cast_shard(part, multiplier, quantizer, steps)
    return QuantizedShard(codes, scales, quantizer, part.cuts, _are_split(part, quantizer), outer)


# ---------------------------------------------------------------------------------- many parts, one message


def whole_amax(part: LocalShard, quantizer: Quantizer) -> Tensor:
    """What this rank knows of the amaxes of the whole: their maximum over all ranks is the amax of every block.

    With it, ranks reduce the amaxes of many tensors in one message, and each then has the scales of all blocks.

    Args:
        part: Of a matrix.
        quantizer: How it will be quantized.

    Returns:
        ``quantizer.scale_shape`` of the whole matrix, float32; 0 where this rank has no element of a block.
    """
    quantizer = quantizer.unpacked() or quantizer
    sides = axis_blocks(part.local.shape, part.cuts, quantizer.block)
    _check_part(part, quantizer)
    _check_transform(part, quantizer)
    found = amax(_window(part, sides), quantizer)
    for dim, side in enumerate(sides):
        found = found if side.block == -1 else side.widen(found, dim)
    return found


def cast_shard(part: LocalShard, multiplier: Tensor, quantizer: Quantizer, steps: Steps = OPS_OF_STEPS) -> Tensor:
    """Codes of a part, by the multipliers of all blocks of the whole.

    Args:
        part: Of a matrix.
        multiplier: ``quantizer.scale_shape`` of the whole matrix, float32.
        quantizer: How.
        steps: By which steps.

    Returns:
        uint8, the shape of the part: one byte a code.
    """
    quantizer = quantizer.unpacked() or quantizer
    sides = axis_blocks(part.local.shape, part.cuts, quantizer.block)
    for dim, side in enumerate(sides):
        multiplier = multiplier if side.block == -1 else side.window(multiplier, dim)
    codes = steps.cast(_window(part, sides), multiplier, quantizer, *_where(sides, quantizer, part))
    return _extracted(codes, part, sides)
