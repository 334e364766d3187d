"""What FSDP2 asks of a sharded parameter: its codes for the wire, and a weight of what arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import local_itself
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.parts import chunks
from fp8compile.tensor.quantized import QuantizedTensor

__all__ = ["FullyShardHooks"]


class FullyShardHooks:
    """The two methods that `torch.distributed.fsdp.fully_shard` calls around its all-gather.

    Codes travel, one byte an element. A scale that all ranks have does not; scales of blocks do, beside them.
    """

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes, as long as every rank's, and what the others have to know."""
        # a shard that stays on the CPU comes as a copy, and is what optimizers write to
        for shard in (self, *map(local_itself, module.parameters(recurse=False))):
            if isinstance(shard, FullyShardHooks):
                shard.share_scale(mesh.get_group(), 0)
        rows = chunks(outer_size[0], mesh.size())
        codes = (
            pad(self.codes, (0, 0, 0, rows[0] - self.codes.shape[0])) if self.codes.shape[0] < rows[0] else self.codes
        )
        scale, block = self.scale, self.quantizer.block[0]
        if block != -1:
            scale = all_gather(scale, 0, [-(-each // block) for each in rows], self.group)
        return (codes,), (scale, outer_size[0])

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The whole weight; with ``out``, that of the gather before, whose codes have been written to already."""
        (codes,), (scale, rows) = all_gather_outputs, metadata
        if out is not None:
            gathered = local_itself(out)
            with torch.autograd._unsafe_preserve_version_counter(gathered.scale):
                gathered.scale.copy_(scale)
            return None
        return QuantizedTensor(codes[:rows], scale.clone(), self.quantizer, param_dtype), (codes,)
