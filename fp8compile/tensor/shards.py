"""Find out how ranks shard a weight, and which ranks share its scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp8compile._compat import is_dtensor, local_itself
from fp8compile.layout.cuts import DimSharding, chunk_sizes

__all__ = ["cut_dim", "share_scale_of_part", "share_scales_of_shard", "sharded_dims", "sharding_of"]


def sharded_dims(placements: Sequence[Any], ndim: int = 2) -> list[tuple[int, int]]:
    """Return (mesh dim, tensor dim) for each mesh dim that shards a tensor with these placements.

    ``ndim`` is the number of the tensor's dims.
    """
    # not is_shard(), which is False for the _StridedShard that FSDP2 makes of rows that tensor parallelism has cut
    cut = [index for index, each in enumerate(placements) if not (each.is_replicate() or each.is_partial())]
    return [(index, placements[index].dim % ndim) for index in cut]


def cut_dim(shard: Tensor, outer_size: Sequence[int]) -> int:
    """Return the dim along which ``shard`` is smaller than the whole tensor of shape ``outer_size``.

    It is 0 if this rank has all elements.
    """
    return next((dim for dim in range(shard.ndim) if shard.shape[dim] != outer_size[dim]), 0)


def share_scales_of_shard(shard: Tensor, mesh: Any, outer_size: Sequence[int], module: Any) -> None:
    """Store in a shard of a quantized parameter which ranks share its scale.

    Args:
        shard: This rank's shard, as FSDP2 hands it to its hooks; with CPU offload a copy of the parameter's shard.
        mesh: The mesh over which FSDP2 shards.
        outer_size: Shape of the whole parameter.
        module: The module that has the parameter. Its other quantized parameters of this shape get the ranks too.
    """
    dim = cut_dim(shard, outer_size)
    for each in (shard, *map(local_itself, module.parameters(recurse=False))):
        if hasattr(each, "share_scale") and each.shape == shard.shape:
            each.share_scale(mesh.get_group(), dim, outer_size[dim])


def sharding_of(weight: Tensor) -> tuple[DimSharding, ...]:
    """Return how tensor parallelism, then FSDP2, shards a weight that is a DTensor; () if it is plain.

    FSDP2 shards the parts that tensor parallelism has made.
    """
    if not is_dtensor(weight):
        return ()
    mesh, size, cuts = weight.device_mesh, list(weight.shape), []
    for index, dim in reversed(sharded_dims(weight.placements, weight.ndim)):
        sizes = chunk_sizes(size[dim], mesh.size(index))
        cuts.append(DimSharding(mesh.get_group(index), mesh.get_local_rank(index), dim, sizes))
        size[dim] = cuts[-1].length
    return tuple(cuts)


def share_scale_of_part(parameter: Any) -> None:
    """Store in the local shard of a quantized DTensor which ranks share its scale, if it does not know them yet."""
    local: Any = local_itself(parameter)
    if local.group is not None:  # known if only tensor parallelism cuts it, or after a forward
        return
    if cuts := sharding_of(parameter):
        local.share_scale(cuts[-1].group, cuts[-1].dim, cuts[-1].total)
