"""Gather the shards of a tensor over ranks, or narrow a tensor to this rank's shard.

A tensor is in high precision (`Plain`) or codes with scales (`Quantized`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.formats import pack, unpack
from fp8compile.layout.cuts import SIDES, DimSharding, Sharding, axis_blocks
from fp8compile.layout.four_bit_packing import packed_dim
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.async_tp import on_the_wire
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.layer.quantize_over_ranks import check_not_packed
from fp8compile.ops.quantize_columns import is_along_columns

__all__ = ["Part", "gather", "narrow"]

Part = TypeVar("Part", Plain, Quantized)


def _cut_again(cuts: Sharding, index: int, dim: int) -> int | None:
    """Return the index of the last group of ranks after ``index`` that also shards ``dim``, or None."""
    behind = ((i, cuts[i]) for i in reversed(range(index + 1, len(cuts))))
    return next((i for i, cut in behind if cut is not None and cut.dim == dim), None)


# ---------------------------------------------------------------------------------- gather


def gather(part: Part, index: int) -> Part:
    """All-gather this rank's shard, ``part``, over the group of ranks in ``part.cuts[index]``.

    If later groups shard the same dim, their shards are gathered first. Scales that differ between ranks are gathered
    too.
    """
    cut: Any = part.cuts[index]  # not None
    if isinstance(part, Quantized):
        if cut.dim >= part.layout.batch:
            check_not_packed(part.quantizer, part.codes.shape, part.shape)
    elif cut.group is None:
        raise RuntimeError(
            f"an operand that is sharded along dim {cut.dim} would have to be all-gathered, but its mesh has no "
            "process groups, because only the layout of the result was requested. Redistribute the operand before "
            "the layer."
        )
    if (again := _cut_again(part.cuts, index, cut.dim)) is not None:
        return gather(gather(part, again), index)
    whole = part.with_cuts((*part.cuts[:index], None, *part.cuts[index + 1 :]))
    if isinstance(part, Plain):
        return replace(whole, local=all_gather(part.local, cut.dim, cut.sizes, cut.group))
    codes, scale, outer_scale = _gathered_codes(part, cut), _gathered_scale(part, cut), part.outer_scale
    if outer_scale is not None and cut.dim < part.layout.batch:  # each matrix has an outer scale
        outer_scale = _gather_scales(outer_scale, cut.dim, cut.sizes, cut.group)
    return replace(whole, codes=codes, scale=scale, outer_scale=outer_scale)


def _gathered_codes(part: Quantized, cut: DimSharding) -> Tensor:
    last = part.codes.ndim - 1
    are_pairs = cut.dim != last and _compat.statically_true(part.codes.shape[-1] % 2 == 0)
    if are_pairs and part.quantizer.code_bits() == 4 and packed_dim(part.quantizer) is None:
        return unpack(all_gather(pack(part.codes, last), cut.dim, cut.sizes, cut.group), last)
    # only Inductor's pass reads this dtype, so eager calls don't change it
    sent = on_the_wire(part.codes, part.quantizer) if _compat.is_traced(part.codes) else part.codes
    if sent.ndim == 2 and is_along_columns(part.quantizer):
        # these codes are column-major: sent as they are, they need no copy. A shard's strides must not decide this,
        # because all ranks have to send the same layout, and a shard of one row has the strides of both.
        codes = all_gather(sent.t(), 1 - cut.dim, cut.sizes, cut.group).t()
    else:
        codes = all_gather(sent, cut.dim, cut.sizes, cut.group)
    return codes if sent is part.codes else codes.view(torch.uint8)


# if both passes multiply the same codes, the backward takes the forward's scales, and gathers only the codes again
_gather_scales = inductor.once_a_graph(all_gather, by_marks=False)


def _gathered_scale(part: Quantized, cut: DimSharding) -> Tensor:
    if cut.dim < part.layout.batch:  # blocks never cross matrices
        return _gather_scales(part.scale, cut.dim, cut.sizes, cut.group)
    last = part.codes.ndim - 1
    is_column = cut.dim == last
    block = part.quantizer.block[is_column]
    if block == -1 or part.has_scales_of_whole[is_column]:
        return part.scale
    if block == 1:
        return _gather_scales(part.scale, -1 if is_column else cut.dim, cut.sizes, cut.group)
    shape = part.codes.shape
    inner = 1 if is_column else math.prod(shape[cut.dim + 1 : last])
    counts = tuple(-(-size * inner // block) for size in cut.sizes)
    if is_column:
        return _gather_scales(part.scale, -1, counts, cut.group)
    if part.layout.batch:
        return _gather_scales(part.scale, -2, counts, cut.group)
    outer = math.prod(shape[: cut.dim])
    grid = part.scale.view(outer, counts[cut.rank], part.scale.shape[-1])
    return _gather_scales(grid, 1, counts, cut.group).flatten(0, 1)


# ---------------------------------------------------------------------------------- narrow


def narrow(part: Part, index: int, cut: DimSharding) -> Part:
    """Narrow ``part`` to this rank's shard by ``cut``, which becomes the sharding ``part.cuts[index]``."""
    if isinstance(part, Quantized):
        check_not_packed(part.quantizer, part.codes.shape, part.shape)
    if (again := _cut_again(part.cuts, index, cut.dim)) is not None:
        return narrow(gather(part, again), index, cut)
    found = part.with_cuts((*part.cuts[:index], cut, *part.cuts[index + 1 :]))
    if isinstance(part, Plain):
        return replace(found, local=part.local.narrow(cut.dim, cut.start, cut.length))
    is_column = cut.dim == part.codes.ndim - 1
    block, of_whole, scale = part.quantizer.block[is_column], list(part.has_scales_of_whole), part.scale
    if block == 1:
        scale = scale.narrow(-1 if is_column else cut.dim, cut.start, cut.length)
    elif block != -1 and not of_whole[is_column]:
        # other groups may cut other dims of this side; `scale` then holds only the blocks of this rank
        side = axis_blocks(part.codes.shape, part.cuts, part.quantizer.block, part.layout.batch)[is_column]
        scale, of_whole[is_column] = side.widen(scale, SIDES[is_column]), True
    codes = part.codes.narrow(cut.dim, cut.start, cut.length)
    return replace(found, codes=codes, scale=scale, has_scales_of_whole=(of_whole[0], of_whole[1]))
