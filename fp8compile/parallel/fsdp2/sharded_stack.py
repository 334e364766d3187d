"""A rank's shard of the weights of experts, in high precision, which FSDP2 gathers as codes.

FSDP2 cuts a stack (E, N, K) along experts, or along another dim where ranks outnumber experts. Scales are an expert's
own either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.parallel.fsdp2.sharded_pair import ShardedPair
from fp8compile.parallel.fsdp2.sharded_weight import Edits, ShardedWeight
from fp8compile.quantizers import Quantizer
from fp8compile.tensor import Gathers, QuantizedStack

if TYPE_CHECKING:
    _Base = ShardedWeight
else:
    _Base = object

__all__ = ["ShardedStack", "ShardedStackPair"]


class _OfExperts(_Base):
    """What the shard of a stack of matrices does otherwise than that of a matrix."""

    batch = 1

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
        return QuantizedStack(codes, scale, quantizer, dtype, outer_scale)

    def scale_of(self, scale: Tensor, size: tuple[int, ...], quantizer: Quantizer) -> Tensor:
        """All of them."""
        return scale

    def shard_dim(self, size: torch.Size) -> int:
        """The dim of which this rank has less than there is; 0 where it has all, which others then have nothing of."""
        return next((dim for dim in range(self.ndim) if self.shape[dim] != size[dim]), 0)


class ShardedStack(_OfExperts, ShardedWeight):
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


class ShardedStackPair(_OfExperts, ShardedPair):
    """A `ShardedPair` of experts."""

    def __init__(self, plain: Tensor, name: str, gathers: Gathers, edits: Edits | None = None) -> None:
        super().__init__(plain, gathers, (), edits)
        self.name = name

    @staticmethod
    def __new__(
        cls: type[ShardedStackPair], plain: Tensor, name: str, gathers: Gathers, edits: Edits | None = None
    ) -> ShardedStackPair:
        """The same memory as another tensor; no copy."""
        return ShardedWeight.__new__(cls, plain)

    def like(self, plain: Tensor, edits: Edits | None = None) -> ShardedStackPair:
        """Another tensor in this one's place: in the same memory, if it counts the same edits."""
        return ShardedStackPair(plain, self.name, self.gathers, edits)

    def of_a_matrix(self, part: Plain) -> Plain:
        """What a rank has of any matrix of the stack: all of it where ranks have other experts."""
        cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in part.cuts if cut.dim)
        return Plain(part.local[0] if len(part.local) else part.local.sum(0), TensorLayout(cuts))
