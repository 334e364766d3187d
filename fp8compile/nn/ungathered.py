"""The weights of experts in a forward of `fp8compile.parallel.graph_fsdp`: each product gathers them, as codes.

What a product multiplies by is not known before it: the output and grad_input may need other codes, and a module of
experts may hand its matrices over transposed. So the module sees an object that knows their shape, and that a grouped
product takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8compile.ops.layer.rows import Rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement  # importing it costs half a second

__all__ = ["UngatheredStack"]


class UngatheredStack:
    """A stack of matrices that ranks share out; it is no tensor, and only grouped products take it.

    Args:
        shard: This rank's matrices, (experts of this rank, N, K).
        rows: The matrices that each rank has.
        dtype: Dtype of the products.
        groups: Number of matrices. PyTorch 2.11 traces no attribute of ``rows``.
        spread: Under expert parallelism, the mesh over which the experts are spread, their placements on it, and how
            many of them these ranks have, whose parts ``rows`` counts.
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
        """How many dims it has."""
        return self.shard.ndim

    @property
    def device(self) -> torch.device:
        """Where it is multiplied."""
        return self.shard.device

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.shard.requires_grad

    def transpose(self, first: int, second: int) -> UngatheredStack:
        """The stack of transposed matrices.

        Raises:
            ValueError: These are not the dims of the matrices.
        """
        if {first % self.ndim, second % self.ndim} != {1, 2}:
            raise ValueError(
                f"transpose({first}, {second}) of the weights of experts, which graph_fsdp has cut along dim 0; "
                "experts are gathered by their products. Transpose dims 1 and 2."
            )
        return UngatheredStack(self.shard.transpose(first, second), self.rows, self.dtype, self.groups, self.spread)

    def to_local(self) -> UngatheredStack:
        """The stack of the experts that this rank multiplies by; under expert parallelism these are some of all."""
        if self.spread is None:
            return self
        return UngatheredStack(self.shard, self.rows, self.dtype, self.spread[2])

    def to(self, dtype: torch.dtype) -> UngatheredStack:
        """Itself, if that is its dtype.

        Raises:
            TypeError: It is another one.
        """
        if dtype != self.dtype:
            raise TypeError(
                f"the weights of experts are used in {self.dtype} and the module casts them to {dtype}. Give "
                "graph_fsdp mp_policy=MixedPrecisionPolicy(param_dtype=...) that says this dtype."
            )
        return self

    def bfloat16(self) -> UngatheredStack:
        """`to` bfloat16."""
        return self.to(torch.bfloat16)
