"""The tensors that FSDP2 sends for a weight of codes, and what those that arrive mean.

    codes of each set        a byte each, or of four bits half of one
    scales of a rank's own   of all sets in one row of bytes, beside the codes

FSDP2 takes tensors of another size beside the codes only if no rank pads, and none from a single rank nor of a weight
that it cuts along another dim than the first, by which it lays out all that arrives. Such scales travel by messages of
their own; scales that all ranks know don't travel.
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
from fp8compile.layout.packing import packed_dim, packed_in_rows
from fp8compile.layout.shapes import scale_shapes
from fp8compile.ops.collectives import all_gather
from fp8compile.quantizers import Gemm, Quantizer

__all__ = ["GatherLayout", "SetToGather", "as_sent", "as_they_travel"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SetToGather:
    """One set of codes of a rank's shard, which a gather may bring.

    Attributes:
        gemm: The product that multiplies them.
        quantizer: What makes them.
        is_own: For each level of scales, whether this rank alone has those of its shard.
        scale_shapes: Shapes of the scales, by level, that belong to what arrives.
        make: Gives the codes as another quantizer of the same codes lays them down, and then scales by level: those
            of the shard if they are its own, else those of the whole.
    """

    gemm: Gemm
    quantizer: Quantizer
    is_own: tuple[bool, ...]
    scale_shapes: Shapes
    make: Callable[[Quantizer], Sequence[Tensor]]

    def bytes_of_own_scales(self, size: Sequence[int]) -> int:
        """Bytes of the scales that are a rank's own, of a shard of this size."""
        dtypes = self.quantizer.scale_dtype(), torch.float32
        levels = zip(scale_shapes(size, self.quantizer), dtypes, self.is_own, strict=False)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype, is_own in levels if is_own)


@dataclass(frozen=True)
class GatherLayout:
    """What arrives. A rank may keep it until the backward, so it has no codes.

    Attributes:
        shards: How ranks cut the weight.
        size: The size of the weight that they have together.
        quantizers: What made the codes of each set of the weight, as they travel.
        scale_shapes: Shapes of the scales of each set of the weight.
        scales: For each product whose codes were sent, its scales by level, and for each whether it travelled beside
            the codes: then it is this rank's own, else that of the whole. Empty if values arrive, and no codes.
    """

    shards: DimSharding
    size: tuple[int, ...]
    quantizers: tuple[Quantizer, ...] = ()
    scale_shapes: tuple[Shapes, ...] = ()
    scales: dict[Gemm, tuple[tuple[Tensor, bool], ...]] | None = None

    @property
    def ranks(self) -> int:
        """How many ranks have parts."""
        return len(self.shards.sizes)

    @property
    def is_alone_with_both(self) -> bool:
        """Whether one tensor brings both sets: FSDP2 takes no other from a rank that has all of a weight."""
        return self.ranks == 1 and len(self.scales or ()) == 2

    def scales_of_whole(self, gathered: Sequence[Tensor]) -> dict[Gemm, list[Tensor]]:
        """Scales of the whole weight, by level, of the sets that were gathered."""
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
    """This rank's shard, padded to the length that every rank sends."""
    padding = max(shards.sizes) - shards.length  # of rows alone: FSDP2 cuts other dims into equal parts
    local = pad(local, (*(0, 0) * (local.ndim - 1), 0, padding)) if padding else local
    return local.contiguous()


def codes_to_send(
    sets: Sequence[SetToGather], gemms: Sequence[Gemm], shards: DimSharding, size: tuple[int, ...], *, together: bool
) -> tuple[tuple[Tensor, ...], GatherLayout]:
    """The tensors that FSDP2 is to send, and what those that arrive mean.

    Args:
        sets: All sets of the weight's codes.
        gemms: The products whose codes are sent.
        shards: How ranks cut the weight.
        size: Of the weight.
        together: Whether all sets travel in each gather. FSDP2's buffers don't change, so each gather has as much
            room for scales as the largest one needs.
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
    """All levels of scales of a weight: those that are each rank's own by messages of their own."""
    dim, found = shards.dim, []
    shapes = [scale_shapes((*size[:dim], each, *size[dim + 1 :]), own.quantizer) for each in shards.sizes]
    for scale, is_own, level in zip(levels, own.is_own, zip(*shapes, strict=True), strict=True):
        found.append(all_gather(scale, dim, [each[dim] for each in level], shards.group) if is_own else scale)
    return found


def as_they_travel(quantizers: Sequence[Quantizer], shards: DimSharding, size: Sequence[int]) -> tuple[Quantizer, ...]:
    """The quantizers of codes as FSDP2 sends them: two codes of four bits to a byte in all sets, or in none.

    Messages of two sets are as long. Codes are sent one a byte if shards are uneven, or columns are cut: of a rank
    that pads its shard, FSDP2 takes only tensors as large as the shard, an element each.
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
    """Equal quantizers as one object: graphs are guarded by which it is."""
    return quantizer
