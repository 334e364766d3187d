"""What FSDP2 asks of a sharded parameter: its codes for the wire, and a weight of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import is_dtensor, local_itself, uncounted_write
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.layer.shards import DimSharding, Sharding, chunk_sizes
from fp8compile.tensor.quantized import QuantizedTensor

__all__ = ["FullyShardHooks", "share_scale_of_part", "sharded_dims", "sharding_of"]


def sharded_dims(placements: Sequence[Any]) -> list[tuple[int, int]]:
    """Dims of the mesh over which a matrix is cut, and along which of its own."""
    # asked so, for what FSDP2 makes of rows that tensor parallelism has cut says that it is no Shard
    cut = [index for index, each in enumerate(placements) if not (each.is_replicate() or each.is_partial())]
    return [(index, placements[index].dim % 2) for index in cut]


def sharding_of(weight: Tensor) -> Sharding:
    """How ranks cut a weight, if it is a DTensor: by tensor parallelism, and then by FSDP2, whose dims come first."""
    if not is_dtensor(weight):
        return ()
    mesh, size, cuts = weight.device_mesh, list(weight.shape), []
    for index, dim in reversed(sharded_dims(weight.placements)):
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


class FullyShardHooks:
    """The two methods that `torch.distributed.fsdp.fully_shard` calls around its all-gather.

    Codes travel, one byte an element. A scale that all ranks have does not; scales of blocks do, beside them.
    """

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes, as long as every rank's, and what the others have to know."""
        dim = int(self.shape[1] != outer_size[1])
        # a shard that stays on the CPU comes as a copy, and is what optimizers write to
        for shard in (self, *map(local_itself, module.parameters(recurse=False))):
            if isinstance(shard, FullyShardHooks):
                shard.share_scale(mesh.get_group(), dim, outer_size[dim])
        sizes = chunk_sizes(outer_size[dim], mesh.size())
        missing = sizes[0] - self.codes.shape[dim]  # of rows: FSDP2 cuts columns into equal parts only
        codes = pad(self.codes, (0, 0, 0, missing)) if missing else self.codes
        scale, block = self.scale, self.quantizer.block[dim]
        if block != -1 and not self.has_all_scales:
            scale = all_gather(scale, dim, [-(-each // block) for each in sizes], self.group)
        return (codes,), (scale, outer_size)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The whole weight; with ``out``, that of the gather before, whose codes have been written to already."""
        (codes,), (scale, size) = all_gather_outputs, metadata
        if out is not None:
            gathered = local_itself(out)
            with uncounted_write(gathered.scale):
                gathered.scale.copy_(scale)
            return None
        whole = codes.view(-1, size[1])[: size[0]]
        with torch.inference_mode(mode=False):  # later gathers write to it, under whatever mode
            scale = scale.clone()
        return QuantizedTensor(whole, scale, self.quantizer, param_dtype), (codes,)
