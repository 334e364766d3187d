"""What FSDP2 asks of a sharded parameter: its codes for the wire, and a weight of what arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import local_itself, uncounted_write
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.layer.shards import chunk_sizes
from fp8compile.tensor.quantized import QuantizedTensor

__all__ = ["FullyShardHooks", "share_scale_of_part"]


def share_scale_of_part(parameter: Any) -> None:
    """Let a shard of a quantized parameter, a DTensor, know the ranks that have its scale too, if it does not yet."""
    local = local_itself(parameter)
    if local.sets()[0].group is not None:  # of tensor parallelism alone, or since a forward
        return
    # dims of FSDP2 come before that of tensor parallelism, and replicas before shards
    dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if dims:
        cut = parameter.placements[dims[0]].dim
        local.share_scale(parameter.device_mesh.get_group(dims[0]), cut, parameter.shape[cut])


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
