"""The tensors that FSDP2 sends for a weight that is sent as codes, and how gathered tensors are read.

Each set of codes is one tensor; a mesh of one rank has both sets in one. The last tensor, 1-D bytes, holds the scales
that only this rank has. If FSDP2 can't send it (one rank, padded shards, sharding along another dim than 0), ranks
exchange scales separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.four_bit_packing import packed_dim, packed_in_rows
from fp8compile.layout.shapes import scale_shapes
from fp8compile.ops.collectives import all_gather
from fp8compile.quantizers import Gemm, Quantizer

__all__ = ["GatherLayout", "SetToGather", "as_sent", "as_they_travel", "codes_to_send"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SetToGather:
    """One set of a weight's codes that FSDP2 may gather: for the output, for grad_input, or for both.

    Attributes:
        gemm: The GEMM that reads the codes.
        quantizer: The quantizer of the codes.
        is_own: For each level of scales (blocks, outer), whether the scales cover only this rank's shard and are sent.
        scale_shapes: Shapes of the gathered weight's scales, by level.
        make: Takes a quantizer, which may pack codes differently than ``quantizer``; returns the codes and then the
            scales by level.
    """

    gemm: Gemm
    quantizer: Quantizer
    is_own: tuple[bool, ...]
    scale_shapes: Shapes
    make: Callable[[Quantizer], Sequence[Tensor]]

    def bytes_of_own_scales(self, size: Sequence[int]) -> int:
        """Return the number of bytes of the scales that only this rank has, for a shard of shape ``size``."""
        dtypes = self.quantizer.scale_dtype(), torch.float32
        levels = zip(scale_shapes(size, self.quantizer), dtypes, self.is_own, strict=False)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype, is_own in levels if is_own)


@dataclass(frozen=True)
class GatherLayout:
    """How to read the tensors of a gather; it holds no codes, because a rank may keep it until the backward.

    Attributes:
        shards: How ranks shard the weight.
        size: Shape of the whole weight.
        quantizers: The quantizer of the output's codes and, if different, of grad_input's, packed as they are sent.
        scale_shapes: For each of these quantizers, the shapes of the whole weight's scales, by level (blocks, outer).
        scales: For each GEMM whose codes are sent, a pair for each level: the scale, and whether it is sent beside the
            codes because it belongs to this rank alone. None if values are gathered.
    """

    shards: DimSharding
    size: tuple[int, ...]
    quantizers: tuple[Quantizer, ...] = ()
    scale_shapes: tuple[Shapes, ...] = ()
    scales: dict[Gemm, tuple[tuple[Tensor, bool], ...]] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that have shards of the weight."""
        return len(self.shards.sizes)

    @property
    def is_alone_with_both(self) -> bool:
        """Whether codes for the output and for grad_input are in one tensor, as a mesh of one rank sends them."""
        return self.ranks == 1 and len(self.scales or ()) == 2

    def scales_of_whole(self, gathered: Sequence[Tensor]) -> dict[Gemm, list[Tensor]]:
        """Return the whole weight's scales (of blocks, then outer) for each GEMM whose codes were gathered."""
        found: dict[Gemm, list[Tensor]] = {}
        start = 0
        for gemm, levels in (self.scales or {}).items():
            found[gemm] = []
            for values, travelled in levels:
                if travelled:
                    rows = gathered[-1].view(self.ranks, -1)[:, start : start + values.nbytes]
                    start += values.nbytes
                    values = rows.clone(memory_format=torch.contiguous_format).view(values.dtype)
                found[gemm].append(values)
        return found


def as_sent(local: Tensor, shards: DimSharding) -> Tensor:
    """Pad this rank's shard ``local`` with zeros to the length that all ranks send."""
    padding = max(shards.sizes) - shards.length  # only rows are padded: FSDP2 cuts other dims into equal parts
    local = pad(local, (*(0, 0) * (local.ndim - 1), 0, padding)) if padding else local
    return local.contiguous()


def codes_to_send(
    sets: Sequence[SetToGather], gemms: Sequence[Gemm], shards: DimSharding, size: tuple[int, ...], *, together: bool
) -> tuple[tuple[Tensor, ...], GatherLayout]:
    """Make the tensors that this rank sends, and the layout by which gathered tensors are read.

    Args:
        sets: The weight's codes for the output and, if different, for grad_input.
        gemms: The GEMMs whose codes are sent.
        shards: How ranks shard the weight.
        size: Shape of the whole weight.
        together: Whether each gather sends all of ``sets``. If not, scales are padded to as many bytes as the scales
            of any of ``sets`` need, because FSDP2's buffers keep their size.
    """
    beside = shards.is_even() and len(shards.sizes) > 1 and shards.dim == 0
    quantizers = as_they_travel([each.quantizer for each in sets], shards, size)
    sent, scales = [], {}
    for each, quantizer in zip(sets, quantizers, strict=True):
        if each.gemm in gemms:
            codes, *levels = each.make(quantizer)
            sent.append(as_sent(codes, shards))
            if not beside:
                levels = _scales_of_all_ranks(levels, each, shards, size)
            scales[each.gemm] = tuple((level, own and beside) for level, own in zip(levels, each.is_own, strict=True))
    if len(shards.sizes) == 1 and len(sent) > 1:
        sent = [torch.cat([each.flatten() for each in sent])]
    local = (*size[: shards.dim], shards.length, *size[shards.dim + 1 :])
    needed = [each.bytes_of_own_scales(local) for each in sets]
    if beside and (room := sum(needed) if together else max(needed)):
        travelling = [level for levels in scales.values() for level, travels in levels if travels]
        row = [each.contiguous().flatten().view(torch.uint8) for each in travelling]
        together_in_row = torch.cat([sent[0].new_empty(0), *row])
        sent.append(pad(together_in_row, (0, room - together_in_row.numel())))
    shapes = tuple(each.scale_shapes for each in sets)
    return tuple(sent), GatherLayout(shards, size, quantizers, shapes, scales)


def _scales_of_all_ranks(
    levels: Sequence[Tensor], own: SetToGather, shards: DimSharding, size: tuple[int, ...]
) -> list[Tensor]:
    """Return the whole weight's scales, by level; ranks exchange those that cover only their own shards.

    ``levels`` has this rank's scales; ``own`` says which cover only its shard.
    """
    dim, found = shards.dim, []
    shapes = [scale_shapes((*size[:dim], each, *size[dim + 1 :]), own.quantizer) for each in shards.sizes]
    for scale, is_own, level in zip(levels, own.is_own, zip(*shapes, strict=True), strict=True):
        found.append(all_gather(scale, dim, [each[dim] for each in level], shards.group) if is_own else scale)
    return found


def as_they_travel(quantizers: Sequence[Quantizer], shards: DimSharding, size: Sequence[int]) -> tuple[Quantizer, ...]:
    """Return the quantizers of the codes as FSDP2 sends them: four-bit codes one or two to a byte.

    Codes for output and grad_input are packed alike, so that their messages have the same length. Uneven shards,
    and shards along another dim than 0, need one code per byte. ``size`` is the whole weight's shape.
    """
    found = [_as_it_travels(each, shards, size) for each in quantizers]
    if any(packed_dim(each) is None for each in found):
        found = [each.unpacked() or each for each in quantizers]
    return tuple(map(_one_object, found))


def _as_it_travels(quantizer: Quantizer, shards: DimSharding, size: Sequence[int]) -> Quantizer:
    found = packed_in_rows(quantizer, size)
    along = packed_dim(found)
    if along is None or not shards.is_even() or shards.dim:
        return quantizer.unpacked() or quantizer
    cuts_bytes = len(size) + along == shards.dim and shards.length % 2
    return found if not cuts_bytes else quantizer.unpacked() or quantizer


@cache
def _one_object(quantizer: Quantizer) -> Quantizer:
    return quantizer
