"""The weights of experts under `fp8compile.parallel.graph_fsdp`: each product gathers them, as codes.

They can't be gathered before, because output and grad_input may need different codes. So the module gets an object
with the weights' shape, which it may transpose and which a grouped product accepts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8compile.ops.layer.fsdp_rows import Rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement  # importing it costs half a second

__all__ = ["UngatheredStack"]


class UngatheredStack:
    """A stack of matrices that is spread over ranks. It is not a tensor; only grouped products accept it.

    Args:
        shard: This rank's matrices, (experts of this rank, N, K).
        rows: How many matrices each rank has.
        dtype: Dtype of the products.
        groups: Number of matrices in the whole stack. PyTorch 2.11 can't trace an attribute of ``rows``.
        spread: Only under expert parallelism: the mesh over which the experts are spread, their placements on it, and
            the number of experts that the ranks of ``rows`` have together.
    """

    def __init__(
        self,
        shard: Tensor,
        rows: Rows,
        dtype: torch.dtype,
        groups: int,
        spread: tuple[DeviceMesh, tuple[Placement, ...], int] | None = None,
    ) -> None:
        self.shard = shard
        self.rows = rows
        self.dtype = dtype
        self.groups = groups
        self.spread = spread

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole stack."""
        return torch.Size((self.groups, *self.shard.shape[1:]))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.shard.ndim

    @property
    def device(self) -> torch.device:
        """Device of the matrices."""
        return self.shard.device

    @property
    def requires_grad(self) -> bool:
        """Whether the stack requires a gradient."""
        return self.shard.requires_grad

    def transpose(self, first: int, second: int) -> UngatheredStack:
        """The stack of transposed matrices.

        Raises:
            ValueError: The dims are not those of the matrices, 1 and 2.
        """
        if {first % self.ndim, second % self.ndim} != {1, 2}:
            raise ValueError(
                f"transpose({first}, {second}) of the weights of experts, which graph_fsdp has cut along dim 0; "
                "experts are gathered by their products. Transpose dims 1 and 2."
            )
        return UngatheredStack(self.shard.transpose(first, second), self.rows, self.dtype, self.groups, self.spread)

    def to_local(self) -> UngatheredStack:
        """The stack of this rank's experts; under expert parallelism these are only a part of all experts."""
        if self.spread is None:
            return self
        return UngatheredStack(self.shard, self.rows, self.dtype, self.spread[2])

    def to(self, dtype: torch.dtype) -> UngatheredStack:
        """The stack itself, if ``dtype`` is its dtype.

        Raises:
            TypeError: ``dtype`` is another dtype.
        """
        if dtype != self.dtype:
            raise TypeError(
                f"the weights of experts are used in {self.dtype} and the module casts them to {dtype}. Give "
                "graph_fsdp mp_policy=MixedPrecisionPolicy(param_dtype=...) that says this dtype."
            )
        return self

    def bfloat16(self) -> UngatheredStack:
        """The same as ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)
