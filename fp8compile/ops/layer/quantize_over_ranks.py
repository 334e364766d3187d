"""Quantize a rank's shard of a tensor to the codes and scales that the whole tensor would have.

Ranks that have elements of the same block exchange the block's amax first. Each of stacked matrices is quantized as if
alone. Amaxes, multipliers (1 / scale) and scales are grids with a value for each block: (block rows, block columns)
for a matrix, (E, block rows, block columns) for E stacked matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat, inductor
from fp8compile.layout.cuts import SIDES, AxisBlocks, DimSharding, Sharding, axis_blocks, split_axes
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout, as_operand
from fp8compile.ops.amax import amax
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.groups.padding import group_to_read
from fp8compile.ops.inductor_hints import realize
from fp8compile.ops.quantization_steps import Scales, Steps
from fp8compile.ops.traced_steps import OPS_OF_STEPS
from fp8compile.quantizers import Quantizer, TwoLevelScaling, with_block
from fp8compile.quantizers.blocks import as_matrix, expand_blocks

__all__ = [
    "cast_part",
    "check_not_packed",
    "dequantized",
    "has_one_scale",
    "expanded_scales",
    "in_whole_blocks",
    "is_aligned",
    "is_cut_within",
    "local_scales",
    "outer_amax_of",
    "part_amax",
    "positions",
    "quantize_part",
    "scales_of",
    "whole_amax",
]

# ---------------------------------------------------------------------------------- stacks as one matrix


def in_whole_blocks(stack: Tensor, rows: int) -> Tensor:
    """Pad each matrix of ``stack``, (E, N, K), with rows of zeros to a multiple of ``rows``."""
    missing = -stack.shape[1] % rows
    return pad(stack, (0, 0, 0, missing)) if missing else stack


def _in_own_blocks(stack: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantizer]:
    """Pad stacked matrices to whole blocks; also return the quantizer for all of them, flattened to one matrix."""
    rows, columns = quantizer.block
    if rows != -1:
        return in_whole_blocks(stack, rows), quantizer
    if stack.shape[1] == 0:  # a block without elements has an amax too
        stack = pad(stack, (0, 0, 0, 1))
    return stack, with_block(quantizer, (stack.shape[1], columns))


def _amax_of_matrices(window: Tensor, quantizer: Quantizer, batch: int, amax: Callable[..., Tensor]) -> Tensor:
    """Return the amax of each block, by ``amax(window, quantizer)``.

    ``batch`` is the number of leading dims that stack matrices: 0, or 1 for (E, M, K).
    """
    if not batch:
        return amax(window, quantizer)
    stack, own = _in_own_blocks(window, quantizer)
    return amax(stack.flatten(0, 1), own).view(window.shape[0], *quantizer.scale_shape(window.shape[1:]))


def _by_blocks(window: Tensor, grid: Tensor, quantizer: Quantizer, compute: Callable[..., Tensor]) -> Tensor:
    """Apply ``compute(matrix, grid, quantizer)`` to stacked matrices (E, N, K), padded and flattened to one matrix."""
    stack, own = _in_own_blocks(window, quantizer)
    matrix = stack.flatten(0, 1)
    found = compute(matrix, grid.reshape(own.scale_shape(matrix.shape)), own)
    per_byte = matrix.shape[0] // found.shape[0] if found.shape[0] else 1  # rows that share a byte
    found = found.view(stack.shape[0], stack.shape[1] // per_byte, found.shape[1])
    return found if stack is window else found[:, : window.shape[1] // per_byte]


# ---------------------------------------------------------------------------------- windows of ranks


def _sides(part: Plain, quantizer: Quantizer) -> tuple[AxisBlocks, AxisBlocks]:
    return axis_blocks(part.local.shape, part.cuts, quantizer.block, part.layout.batch)


def _window(part: Plain, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    """Return the part's elements, zero-padded to begin at a block boundary if shards cut through blocks."""
    if all(side.kind != "split" for side in sides):
        return part.local
    window = part.local if part.layout.batch else as_matrix(part.local)
    for dim, side in zip(SIDES, sides, strict=True):
        window = side.embed(window, dim) if side.kind == "split" else window
    return window


def _extracted(codes: Tensor, part: Plain, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    """Return ``codes`` without the padding of `_window`."""
    if all(side.kind != "split" for side in sides):
        return codes
    for dim, side in zip(SIDES, sides, strict=True):
        codes = side.extract(codes, dim) if side.kind == "split" else codes
    return codes.reshape(part.local.shape)


# ---------------------------------------------------------------------------------- amaxes


def part_amax(part: Plain, quantizer: Quantizer) -> Tensor:
    """Return the amaxes of a part's blocks, reduced over all ranks that have elements of these blocks."""
    return _window_and_amax(part, quantizer, OPS_OF_STEPS)[1]


def check_not_packed(quantizer: Quantizer, codes: Sequence[int], values: Sequence[int]) -> None:
    """Raise a ValueError if the shapes of codes and of their values differ: ranks can't shard or send packed codes."""
    if tuple(codes) != tuple(values):
        raise ValueError(
            f"{quantizer!r} stores several values per byte, which is not supported if one operand of a GEMM is "
            "sharded over ranks. Use another recipe, or override unpacked() in the quantizer's class: it returns a "
            "quantizer that stores the same values one per byte."
        )


def _check_part(part: Plain, quantizer: Quantizer) -> None:
    batch = part.layout.batch
    if any(part.cuts) or batch:
        shape = part.local.shape[batch:]
        check_not_packed(quantizer, quantizer.codes_shape(shape), shape)


def _check_transform(part: Plain, quantizer: Quantizer) -> None:
    """Raise a ValueError if ranks cut the groups of values that the quantizer transforms, or a group is incomplete."""
    if not (group := len(quantizer.transform())):
        return
    tokens = quantizer.block[0] == group
    side = _sides(part, quantizer)[0 if tokens else 1]
    if side.kind == "split" or not _compat.statically_true(side.total % group == 0):  # same answer on all ranks
        raise ValueError(
            f"the transform of {quantizer!r} applies to groups of {group} {'tokens' if tokens else 'features'}, but "
            f"this rank has a shard of {side.length} of {side.total}. Shard in multiples of {group}, or use a recipe "
            "without a transform, such as fp8compile.recipes.nvfp4(hadamard=())."
        )


def _window_and_amax(
    part: Plain, quantizer: Quantizer, steps: Steps, local_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[AxisBlocks, AxisBlocks]]:
    _check_part(part, quantizer)
    return _window_and_amax_over_ranks(part.local, local_amax, part.cuts, part.layout.batch, quantizer, steps.amax)


# Ranks make their windows by different ops, or by none. If forward and backward share one call, compilers of all ranks
# send the same messages.
@inductor.once_a_graph
def _window_and_amax_over_ranks(
    local: Tensor,
    local_amax: Tensor | None,
    cuts: Sharding,
    batch: int,
    quantizer: Quantizer,
    amax: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, tuple[AxisBlocks, AxisBlocks]]:
    part = Plain(local, TensorLayout(cuts, batch))
    sides = _sides(part, quantizer)
    window = _window(part, sides)
    found = _amax_of_matrices(window, quantizer, batch, amax) if local_amax is None else local_amax
    for dim, side in zip(SIDES, sides, strict=True):
        found = side.widen(found, dim) if side.kind == "split" else found
    for group in dict.fromkeys(group for side in sides if side.kind != "aligned" for group in side.groups):
        found = found if group is None else all_reduce_amax(found, group)
    return window, found, sides


def whole_amax(part: Plain, quantizer: Quantizer) -> Tensor:
    """Compute this rank's contribution to the amax grid of the whole tensor, float32, from its ``part``.

    The contribution is 0 for blocks without elements on this rank; the maximum over ranks is the amax of every block.
    Ranks can reduce the contributions for many tensors in one message.
    """
    quantizer, batch = quantizer.unpacked() or quantizer, part.layout.batch
    sides = _sides(part, quantizer)
    _check_part(part, quantizer)
    _check_transform(part, quantizer)
    found = _amax_of_matrices(_window(part, sides), quantizer, batch, amax)
    for dim, side in zip(SIDES, sides, strict=True):
        found = found if side.block == -1 else side.widen(found, dim)
    if (cut := _cut_of_matrices(part)) is not None:
        found = pad(found, (0, 0, 0, 0, cut.start, cut.total - cut.start - cut.length))
    return found


def _cut_of_matrices(part: Plain) -> DimSharding | None:
    """Return the sharding of stacked weights by whole matrices, or None."""
    return next((cut for cut in part.cuts if cut is not None and cut.dim < part.layout.batch), None)


# ---------------------------------------------------------------------------------- scales


def has_one_scale(quantizer: Quantizer) -> bool:
    """Whether a matrix has one scale, outer or tensorwise, that other matrices may share."""
    return quantizer.has_outer_scale() or quantizer.block == (-1, -1)


def _takes_all_matrices(quantizer: Quantizer) -> bool:
    """Whether the quantizer can compute the scales of all stacked matrices in one call."""
    return type(quantizer) is TwoLevelScaling


def outer_amax_of(amaxes: Tensor, quantizer: Quantizer, batch: int, steps: Steps = OPS_OF_STEPS) -> Tensor:
    """Return the amax of a whole matrix, (1,) float32, or of each of E stacked matrices, (E,).

    ``amaxes`` has the amax of each block. ``batch`` is the number of leading dims that stack matrices, 0 or 1.
    """
    if not batch:
        return steps.outer_amax(amaxes, quantizer)
    if _takes_all_matrices(quantizer):
        if not amaxes.numel():
            return _compat.without_elements(amaxes.new_zeros(len(amaxes)), amaxes)
        return amaxes.amax((1, 2))
    return torch.cat([amaxes.new_empty(0), *(steps.outer_amax(each, quantizer) for each in amaxes)])


def scales_of(
    amaxes: Tensor,
    quantizer: Quantizer,
    steps: Steps = OPS_OF_STEPS,
    cuts: Sharding = (),
    outer_amax: Tensor | None = None,
    batch: int = 0,
) -> Scales:
    """Compute the multiplier (1 / scale), the scale and the outer scale (or None) from amaxes.

    Args:
        amaxes: The amax grid of a matrix or of stacked matrices, or a shard of this grid.
        quantizer: Quantizer of each matrix.
        steps: The functions for amax, scale and cast.
        cuts: How ranks shard the tensor; the outer amax of a matrix is first reduced over these ranks.
        outer_amax: Amax of each whole matrix, if known; ranks then reduce nothing.
        batch: Number of leading dims over which matrices are stacked.
    """
    if not quantizer.has_outer_scale():
        return steps.scales(amaxes, quantizer)
    if outer_amax is None:
        outer_amax = outer_amax_of(amaxes, quantizer, batch, steps)
        for cut in cuts:
            if cut is not None and cut.dim >= batch:
                outer_amax = all_reduce_amax(outer_amax, cut.group)
    if not batch:
        return steps.scales(amaxes, quantizer, outer_amax)
    return _two_scales_of_stack(amaxes, outer_amax, quantizer, steps)


def _two_scales_of_stack(amaxes: Tensor, outer_amax: Tensor, quantizer: Quantizer, steps: Steps) -> Scales:
    if not len(amaxes):
        return amaxes, amaxes.to(quantizer.scale_dtype()), outer_amax
    if _takes_all_matrices(quantizer):
        stored = realize if _compat.is_traced(amaxes) else lambda values: values
        outer_amax = outer_amax.view(-1, 1, 1)
        outer_scale = stored(quantizer.outer_scale(outer_amax))
        scale = quantizer.block_scale(amaxes, outer_amax)
        return stored(quantizer.block_multiplier(scale, outer_scale)), scale, outer_scale.flatten()
    pairs = zip(amaxes, outer_amax.split(1), strict=True)
    multipliers, scales, outer_scales = zip(*(steps.two_scales(*pair, quantizer) for pair in pairs), strict=True)
    return torch.stack(multipliers), torch.stack(scales), torch.cat(outer_scales)


def local_scales(scales: Tensor, shape: Sequence[int], cuts: Sharding, quantizer: Quantizer, batch: int = 0) -> Tensor:
    """Select the scales of a shard of shape ``shape`` from the grid of the whole tensor's scales.

    Along a dim where shards cut through blocks, all scales are kept.
    """
    for dim, side in zip(SIDES, axis_blocks(shape, cuts, quantizer.block, batch), strict=True):
        scales = side.window(scales, dim) if side.kind == "aligned" and side.block != -1 else scales
    return scales


# ---------------------------------------------------------------------------------- codes


def positions(part: Plain, quantizer: Quantizer) -> tuple[Tensor, ...]:
    """Return a part's row and column positions in the whole tensor, for `cast`; () if codes don't depend on them."""
    return _positions(_sides(part, quantizer), quantizer, part)


def _positions(sides: tuple[AxisBlocks, AxisBlocks], quantizer: Quantizer, part: Plain) -> tuple[Tensor, ...]:
    """Return the positions of rows and columns that `_window` padded; () if codes don't depend on them."""
    if quantizer.is_local():
        return ()
    rows, columns = (side.window_positions(part.local.device) for side in sides)
    return rows * sides[1].total, columns


def _cast(
    window: Tensor, multiplier: Tensor, quantizer: Quantizer, batch: int, steps: Steps, where: tuple[Tensor, ...]
) -> Tensor:
    """Cast ``window``, which `_window` padded, to codes; ``where`` are the positions that `_positions` returns."""
    if not batch:
        return steps.cast(window, multiplier, quantizer, *where)

    def cast(matrix: Tensor, grid: Tensor, own: Quantizer) -> Tensor:
        places: tuple[Tensor, ...] = ()
        if where and len(window):  # noise is that of a place in its own matrix
            rows, columns = where
            per_matrix = matrix.shape[0] // window.shape[0]
            places = pad(rows, (0, per_matrix - len(rows))).repeat(window.shape[0]), columns
        return steps.cast(matrix, grid, own, *places)

    return _by_blocks(window, multiplier, quantizer, cast)


def is_cut_within(part: Plain) -> bool:
    """Whether ranks shard rows or columns of matrices, and not only the dim that stacks matrices."""
    cuts, batch = part.layout.cuts, part.layout.batch
    return bool(cuts) and any(cut is not None and cut.dim >= batch for cut in cuts)


def is_aligned(part: Plain, quantizer: Quantizer) -> bool:
    """Whether no block of the part spans ranks, so that ranks exchange nothing to quantize it."""
    return not is_cut_within(part) or all(side.kind == "aligned" for side in _sides(part, quantizer))


def quantize_part(
    part: Plain,
    quantizer: Quantizer,
    steps: Steps = OPS_OF_STEPS,
    *,
    local_amax: Tensor | None = None,
    whole_amax: Tensor | None = None,
    outer_amax: Tensor | None = None,
) -> Quantized:
    """Quantize this rank's part to the codes and scales that the whole tensor would have.

    All ranks of the process groups that ``part`` is sharded over call this function.

    Args:
        part: This rank's shard of a tensor.
        quantizer: Quantizer of the tensor, or of each stacked matrix.
        steps: The functions for amax, scale and cast.
        local_amax: The amax grid of the part, if known and if no shard cuts a block.
        whole_amax: The amax grid of the whole tensor, if known; ranks then exchange no amax of blocks.
        outer_amax: The amax, (1,) float32, for the tensor's outer scale or tensorwise scale, if tensors share this
            scale.
    """
    if outer_amax is not None and quantizer.block == (-1, -1):
        return quantize_part(part, quantizer, steps, whole_amax=outer_amax.view(1, 1))
    batch, is_cut = part.layout.batch, is_cut_within(part)
    if is_cut or (part.cuts and not batch):  # codes are not packed if ranks may still cut or send them
        quantizer = quantizer.unpacked() or quantizer
        _check_transform(part, quantizer)
    if whole_amax is not None and any(part.cuts):
        return _by_whole_amax(part, quantizer, steps, whole_amax)
    if not is_cut:
        amaxes = local_amax if whole_amax is None else whole_amax
        if batch:
            return _quantize_stack(part, quantizer, steps, amaxes, outer_amax)
        return steps.quantize(part, quantizer, amaxes, outer_amax)
    window, found, sides = _window_and_amax(part, quantizer, steps, local_amax)
    multiplier, scale, outer_scale = scales_of(found, quantizer, steps, part.cuts, outer_amax, batch)
    for dim, side in zip(SIDES, sides, strict=True):
        multiplier = side.window(multiplier, dim) if side.kind == "split" else multiplier
    where = () if batch and not quantizer.has_outer_scale() else _positions(sides, quantizer, part)
    codes = _extracted(_cast(window, multiplier, quantizer, batch, steps, where), part, sides)
    return _quantized(part, codes, scale, quantizer, outer_scale)


def _quantize_stack(
    stack: Plain, quantizer: Quantizer, steps: Steps, amaxes: Tensor | None, outer_amax: Tensor | None
) -> Quantized:
    """Quantize stacked matrices that are whole on this rank; amaxes that are not given are computed."""
    quantizer = _for_matrices(stack, quantizer)
    amaxes = _amax_of_matrices(stack.local, quantizer, 1, steps.amax) if amaxes is None else amaxes
    multiplier, scale, outer_scale = scales_of(amaxes, quantizer, steps, outer_amax=outer_amax, batch=1)
    where = positions(stack, quantizer) if quantizer.has_outer_scale() else ()
    codes = _cast(stack.local, multiplier, quantizer, 1, steps, where)
    return Quantized(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer_scale, layout=stack.layout)


def _for_matrices(part: Plain, quantizer: Quantizer) -> Quantizer:
    """Return the quantizer to use for each matrix of the stack ``part``.

    `TwoLevelScaling` packs two codes a byte, if the matrices' sizes allow; another quantizer that packs is unpacked.
    """
    if _takes_all_matrices(quantizer):
        return quantizer.for_shape(part.local.shape[1:])
    quantizer = quantizer.unpacked() or quantizer
    _check_part(part, quantizer)
    return quantizer


def _quantized(
    part: Plain, codes: Tensor, scale: Tensor, quantizer: Quantizer, outer_scale: Tensor | None
) -> Quantized:
    return Quantized(
        codes=codes,
        scale=scale,
        quantizer=quantizer,
        outer_scale=outer_scale,
        layout=part.layout,
        has_scales_of_whole=split_axes(part.local.shape, part.cuts, quantizer.block, part.layout.batch),
    )


def _by_whole_amax(part: Plain, quantizer: Quantizer, steps: Steps, whole_amax: Tensor) -> Quantized:
    multiplier, scale, outer_scale = scales_of(whole_amax, quantizer, steps, batch=part.layout.batch)
    scale = local_scales(scale, part.local.shape, part.cuts, quantizer, part.layout.batch)
    codes = cast_part(part, multiplier, quantizer, steps)
    return _quantized(part, codes, scale, quantizer, outer_scale)


def cast_part(part: Plain, multiplier: Tensor, quantizer: Quantizer, steps: Steps = OPS_OF_STEPS) -> Tensor:
    """Cast a part to one code per byte; ``multiplier`` (1 / scale) is the grid of the whole tensor.

    For stacked matrices, stochastic rounding uses positions in this part.
    """
    quantizer, batch = quantizer.unpacked() or quantizer, part.layout.batch
    sides = _sides(part, quantizer)
    multiplier = _grid_of_part(multiplier, part, sides)
    where = () if batch else _positions(sides, quantizer, part)
    return _extracted(_cast(_window(part, sides), multiplier, quantizer, batch, steps, where), part, sides)


def _grid_of_part(grid: Tensor, part: Plain, sides: tuple[AxisBlocks, AxisBlocks]) -> Tensor:
    if (cut := _cut_of_matrices(part)) is not None:
        grid = grid.narrow(0, cut.start, cut.length)
    for dim, side in zip(SIDES, sides, strict=True):
        grid = grid if side.block == -1 else side.window(grid, dim)
    return grid


def dequantized(part: Quantized, dtype: torch.dtype) -> Plain:
    """Dequantize a part: codes times scales in float32, rounded once to ``dtype``."""
    operand, *windows = as_operand(part)
    codes, quantizer, outer = operand.codes, operand.quantizer, operand.scales[1:]
    if part.layout.batch:
        codes, quantizer = one_a_byte(codes, quantizer)
        values = _values_of_stack(codes, operand.scale, quantizer, dtype, *outer)
    else:
        if outer and (offs := part.layout.offs) is not None:  # each row takes the outer scale of its group
            outer = (outer[0][group_to_read(offs, codes.shape[0])].unsqueeze(1),)
        values = dequantize(codes, operand.scale, quantizer, dtype, *outer)
    for dim, window in zip(SIDES, windows, strict=True):
        values = values if window is None else window.extract(values, dim)
    return Plain(values.reshape(part.shape), part.layout)


def _values_of_stack(
    codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, outer_scale: Tensor | None = None
) -> Tensor:
    if outer_scale is None:
        return _by_blocks(codes, scale, quantizer, lambda *each: dequantize(*each, dtype))
    found = [codes.new_empty((0, *codes.shape[1:]), dtype=dtype)]
    for matrix, own, outer in zip(codes.split(1), scale.split(1), outer_scale.split(1), strict=True):
        found.append(_by_blocks(matrix, own, quantizer, lambda *each, outer=outer: dequantize(*each, dtype, outer)))
    return torch.cat(found)


def expanded_scales(codes: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a float32 scale for each element, which broadcasts against codes (N, K) or (E, N, K)."""
    if codes.ndim == 2:
        return expand_blocks(quantizer.scale_values(scale), codes.shape, quantizer.block)

    def expanded(matrix: Tensor, grid: Tensor, own: Quantizer) -> Tensor:
        return expand_blocks(own.scale_values(grid), matrix.shape, own.block).expand(matrix.shape)

    return _by_blocks(codes, scale, quantizer, expanded)
