"""Experts' weights under `fp8compile.parallel.graph_fsdp`, whose codes each grouped GEMM gathers.

The weights can't be gathered before the GEMM, because output and grad_input may need different codes. The module
therefore gets an object with the weights' shape, which it may transpose and pass to a grouped GEMM.
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
    """A rank's shard of stacked weights that looks like the whole stack; only grouped GEMMs take it.

    Args:
        shard: This rank's matrices, (experts of this rank, out_features, in_features).
        rows: How many matrices each rank has.
        dtype: Dtype in which the GEMMs use the matrices.
        groups: Number of matrices in the whole stack.
        spread: Only under expert parallelism: the mesh over which the experts are spread, their placements on this
            mesh, and the number of experts that the ranks of ``rows`` have together.
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
        """Shape of the whole stack."""
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
        """Whether the weights require a gradient."""
        return self.shard.requires_grad

    def transpose(self, first: int, second: int) -> UngatheredStack:
        """Return a new stack with transposed matrices; raise a ValueError for other dims than 1 and 2."""
        if {first % self.ndim, second % self.ndim} != {1, 2}:
            raise ValueError(
                f"transpose({first}, {second}) of expert weights that graph_fsdp has sharded along dim 0 is not "
                "supported, because the weights are gathered only inside their GEMMs. Transpose dims 1 and 2."
            )
        return UngatheredStack(self.shard.transpose(first, second), self.rows, self.dtype, self.groups, self.spread)

    def to_local(self) -> UngatheredStack:
        """Return this rank's part of the stack under expert parallelism; the stack itself without it."""
        if self.spread is None:
            return self
        return UngatheredStack(self.shard, self.rows, self.dtype, self.spread[2])

    def to(self, dtype: torch.dtype) -> UngatheredStack:
        """Return the stack unchanged; raise a TypeError if ``dtype`` is not its dtype."""
        if dtype != self.dtype:
            raise TypeError(
                f"the expert weights are used in {self.dtype}, but the module casts them to {dtype}. Pass "
                f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype}) to graph_fsdp."
            )
        return self

    def bfloat16(self) -> UngatheredStack:
        """The same as ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)
