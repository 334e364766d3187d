"""What FSDP2 asks of a sharded parameter: its codes for the wire, and a weight of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import is_dtensor, keeps_parts_after_forward, local_itself, uncounted_write
from fp8compile.layout.cuts import DimSharding, Sharding, chunk_sizes
from fp8compile.layout.packing import one_a_byte, packed_dim, packed_in_rows
from fp8compile.layout.shapes import codes_shape
from fp8compile.ops.collectives import all_gather
from fp8compile.quantizers import Quantizer
from fp8compile.tensor.gathered_pair import as_sent

__all__ = [
    "FullyShardHooks",
    "as_it_travels",
    "as_pair_travels",
    "codes_by",
    "cut_dim",
    "levels_of",
    "scale_of_all_ranks",
    "share_scale_of_part",
    "share_scales_of_shard",
    "sharded_dims",
    "sharding_of",
]


def sharded_dims(placements: Sequence[Any], ndim: int = 2) -> list[tuple[int, int]]:
    """Dims of the mesh over which a tensor is cut, and along which of its own ``ndim`` dims."""
    # asked so, for what FSDP2 makes of rows that tensor parallelism has cut says that it is no Shard
    cut = [index for index, each in enumerate(placements) if not (each.is_replicate() or each.is_partial())]
    return [(index, placements[index].dim % ndim) for index in cut]


def cut_dim(shard: Tensor, outer_size: Sequence[int]) -> int:
    """The dim along which a shard has less than there is; 0 if it has all, of which other ranks then have nothing."""
    return next((dim for dim in range(shard.ndim) if shard.shape[dim] != outer_size[dim]), 0)


def share_scales_of_shard(shard: Tensor, mesh: Any, outer_size: Sequence[int], module: Any) -> None:
    """Let a shard know the ranks that have its scale too; and that which it is a copy of, if it stays on the CPU."""
    dim = cut_dim(shard, outer_size)
    for each in (shard, *map(local_itself, module.parameters(recurse=False))):
        if hasattr(each, "share_scale") and each.shape == shard.shape:
            each.share_scale(mesh.get_group(), dim, outer_size[dim])


def sharding_of(weight: Tensor) -> Sharding:
    """How ranks cut a weight, if it is a DTensor: by tensor parallelism, and then by FSDP2, whose dims come first."""
    if not is_dtensor(weight):
        return ()
    mesh, size, cuts = weight.device_mesh, list(weight.shape), []
    for index, dim in reversed(sharded_dims(weight.placements, weight.ndim)):
        sizes = chunk_sizes(size[dim], mesh.size(index))
        cuts.append(DimSharding(mesh.get_group(index), mesh.get_local_rank(index), dim, sizes))
        size[dim] = cuts[-1].length
    return tuple(cuts)


def share_scale_of_part(parameter: Any) -> None:
    """Let a shard of a quantized parameter, a DTensor, know the ranks that have its scale too, if it does not yet."""
    local = local_itself(parameter)
    if local.sets()[0].group is not None:  # of tensor parallelism alone, or since a forward
        return
    if cuts := sharding_of(parameter):
        local.share_scale(cuts[-1].group, cuts[-1].dim, cuts[-1].total)


def levels_of(own: Any, dim: int) -> list[tuple[Tensor, int | None]]:
    """All levels of scales of a set of codes, of which ranks have shards along a dim.

    Returns:
        Of each level its scales, and how many elements along the dim have one; None if all ranks have these scales.
    """
    block = own.block_along(dim)
    levels = [(own.scale, None if block == -1 or own.has_all_scales else block)]
    if own.outer_scale is not None:
        levels.append((own.outer_scale, 1 if own.is_stacked_along(dim) else None))
    return levels


def scale_of_all_ranks(scale: Tensor, block: int | None, shards: DimSharding) -> Tensor:
    """The scales of the whole weight, of one level as `levels_of` has it."""
    if block is None:
        return scale
    return all_gather(scale, shards.dim, [-(-each // block) for each in shards.sizes], shards.group)


def as_it_travels(quantizer: Quantizer, shards: DimSharding, size: Sequence[int]) -> Quantizer:
    """The quantizer of codes as FSDP2 sends them: of four bits two to a byte, but for uneven shards, or of columns.

    Of a rank that pads its shard, FSDP2 takes only tensors as large as the shard, an element each.
    """
    found = packed_in_rows(quantizer, size)
    along = packed_dim(found)
    if along is None or not shards.is_even() or shards.dim:
        return _one_object(quantizer.unpacked() or quantizer)
    cuts_bytes = len(size) + along == shards.dim and shards.length % 2
    return _one_object(quantizer.unpacked() if cuts_bytes else found)


def as_pair_travels(
    quantizers: Sequence[Quantizer], shards: DimSharding, size: Sequence[int]
) -> tuple[Quantizer, Quantizer]:
    """Those of two sets of codes, of which either both have two codes to a byte or none: messages are as long."""
    first, second = (as_it_travels(each, shards, size) for each in quantizers)
    if packed_dim(first) is None or packed_dim(second) is None:
        first, second = (_one_object(each.unpacked() or each) for each in quantizers)
    return first, second


@cache
def _one_object(quantizer: Quantizer) -> Quantizer:
    """Equal quantizers as one object: graphs are guarded by which it is."""
    return quantizer


def codes_by(own: Any, quantizer: Quantizer) -> Tensor:
    """The codes of a shard as another quantizer of the same codes lays them down."""
    return own.codes if own.quantizer == quantizer else one_a_byte(own.codes, own.quantizer)[0]


@keeps_parts_after_forward
class FullyShardHooks:
    """The two methods that `torch.distributed.fsdp.fully_shard` calls around its all-gather.

    Codes travel, one byte an element, of four bits half of one. A scale that all ranks have does not; scales of blocks
    do, beside them.
    """

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes, as long as every rank's, and what the others have to know."""
        share_scales_of_shard(self, mesh, outer_size, module)
        dim = cut_dim(self, outer_size)
        shards = DimSharding(self.group, mesh.get_local_rank(), dim, chunk_sizes(outer_size[dim], mesh.size()))
        quantizer = as_it_travels(self.quantizer, shards, outer_size)
        sent = as_sent(codes_by(self, quantizer), shards)
        scales = [scale_of_all_ranks(*level, shards) for level in levels_of(self, dim)]
        return (sent,), (scales, quantizer, outer_size)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight; with ``out``, that of the gather before, whose codes have been written to already."""
        (codes,), (scales, quantizer, size) = all_gather_outputs, metadata
        if out is not None:
            for memory, values in zip(local_itself(out).parts()[1:], scales, strict=True):
                with uncounted_write(memory):
                    memory.copy_(values)
            return None
        shape = codes_shape(size, quantizer)
        whole = codes.view(-1, *shape[1:])[: shape[0]]
        with torch.inference_mode(mode=False):  # later gathers write to them, under whatever mode
            scale, *outer = own = [each.clone() for each in scales]
        beside = {"outer_scale": outer[0]} if outer else {}
        return self.gathered_as(whole, scale, quantizer, param_dtype, **beside), (codes, *own)  # FSDP2 frees these
