"""A rank's shard of the weights of experts, in high precision, which FSDP2 gathers as codes.

FSDP2 cuts a stack (E, N, K) along experts, or along another dim where ranks outnumber experts. Scales are an expert's
own either way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8compile.nn.experts import is_transposed
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.stacks import cast_stack, whole_amax_of_stack
from fp8compile.parallel.fsdp2.sharded_weight import Edits, ShardedWeight
from fp8compile.quantizers import Quantizer
from fp8compile.tensor import QuantizedStack

__all__ = ["ShardedStack"]


class ShardedStack(ShardedWeight):
    """A `ShardedWeight` of experts."""

    def __init__(self, plain: Tensor, name: str, edits: Edits | None = None) -> None:
        super().__init__(plain, (), edits)
        self.name = name

    @staticmethod
    def __new__(cls: type[ShardedStack], plain: Tensor, name: str, edits: Edits | None = None) -> ShardedStack:
        """The same memory as another tensor; no copy."""
        return ShardedWeight.__new__(cls, plain)

    def like(self, plain: Tensor, edits: Edits | None = None) -> ShardedStack:
        """Another tensor in this one's place: in the same memory, if it counts the same edits."""
        return ShardedStack(plain, self.name, edits)

    def quantizer_of(self, module: nn.Module) -> Quantizer:
        """What quantizes each matrix, as it lies in memory."""
        quantizer = module.recipe.weight
        return quantizer.transposed() if is_transposed(module) else quantizer

    def amax_of(self, part: LocalShard, quantizer: Quantizer) -> Tensor:
        """What this rank knows of the amaxes of the whole stack."""
        return whole_amax_of_stack(part, quantizer)

    def codes_of(self, part: LocalShard, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
        """Codes of ``part``, by the multipliers of all blocks of the whole stack."""
        return cast_stack(part, multiplier, quantizer)

    def gathered(
        self,
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        group: ProcessGroup,
        outer_scale: Tensor | None = None,
    ) -> Tensor:
        """The weights that the experts see."""
        return QuantizedStack(codes, scale, quantizer, dtype)

    def scale_of(self, scale: Tensor, size: tuple[int, ...], quantizer: Quantizer) -> Tensor:
        """All of them."""
        return scale

    def shard_dim(self, size: torch.Size) -> int:
        """The dim of which this rank has less than there is; 0 where it has all, which others then have nothing of."""
        return next((dim for dim in range(self.ndim) if self.shape[dim] != size[dim]), 0)
