"""Which rows of a parameter a rank has, and what its ops have to know of that.

    mesh                   parameter                                         groups
    (shard)                Shard(0)                                          rows: its ranks
    (replicate, shard)     Replicate(), Shard(0)                             and replicas: ranks with the same rows
    one of these, and tp   the same, before the placements that it had       rows of what a tp rank has

That is how `torch.distributed.fsdp.fully_shard` lays out parameters, so checkpoints of the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8compile import _compat
from fp8compile.layout.cuts import Sharding, chunk_sizes
from fp8compile.ops import fsdp_gather
from fp8compile.ops.layer.rows import Rows, placed_of
from fp8compile.parallel.placed import part_of
from fp8compile.tensor import in_place_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # importing it needs DTensor, which imports this

__all__ = ["Shared", "Where", "gather", "shard_parameter", "used_dtype"]


@dataclass(frozen=True)
class Shared:
    """What tensor parallel ranks have of a parameter, before it is sharded.

    Attributes:
        mesh: Their mesh.
        placements: A parameter's on it.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Where:
    """What is known of a parameter.

    Attributes:
        dtype: In which it is used.
        rows: Which each rank has.
        shared: With tensor parallel ranks, or with those that have other experts.
    """

    dtype: torch.dtype
    rows: Rows
    shared: Shared | None = None

    @property
    def experts(self) -> int:
        """How many experts' matrices the ranks that share the rows have together."""
        return sum(self.rows.sizes)

    def tensor_parallel_groups(self) -> list[str]:
        """Names of the groups that share the parameter before it is sharded, one for each dim of their mesh."""
        mesh = None if self.shared is None else self.shared.mesh
        return [] if mesh is None else [mesh.get_group(index).group_name for index in range(mesh.ndim)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a model is on the same ranks


def used_dtype(where: Where, device_type: str) -> torch.dtype:
    """The dtype in which a layer multiplies: that of autocast, if it is on."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return where.dtype


def _where(
    mesh: DeviceMesh, local: Tensor, mp_policy: MixedPrecisionPolicy, shared: Shared | None, cuts: Sharding
) -> Where:
    last = mesh.ndim - 1
    dtype = local.dtype
    if mp_policy.param_dtype is not None and dtype.is_floating_point:
        dtype = mp_policy.param_dtype
    reduce_dtype = mp_policy.reduce_dtype or _compat.default_reduce_dtype(local.dtype, dtype)
    rows = Rows(
        sizes=chunk_sizes(local.shape[0], mesh.size(last)),
        rank=mesh.get_local_rank(last),
        group=mesh.get_group(last).group_name,
        replicas=mesh.get_group(0).group_name if mesh.ndim == 2 else "",
        reduce_dtype=str(reduce_dtype).removeprefix("torch."),
        placed=placed_of(cuts),
    )
    return Where(dtype, rows, shared)


def _whole_placements(mesh: DeviceMesh, shared: Shared | None) -> tuple[DeviceMesh, Sequence[Placement]]:
    """The mesh of the sharded parameter, and where it is on that."""
    replicate = (Replicate(),) * (mesh.ndim - 1)
    if shared is None:
        return mesh, (*replicate, Shard(0))
    parts = 1
    for index, placement in enumerate(shared.placements):
        if placement.is_shard(0):
            parts *= shared.mesh.size(index)
    own = Shard(0) if parts == 1 else _compat.strided_shard(0, parts)
    return _compat.concatenated(mesh, shared.mesh), (*replicate, own, *shared.placements)


def shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
) -> tuple[nn.Parameter, Where]:
    """This rank's rows of a parameter, as a DTensor, and where they are.

    Args:
        parameter: Plain, or a DTensor on a tensor parallel mesh; on all ranks the same values.
        mesh: Of one dim, or of two, the first of which replicates.
        mp_policy: Dtypes.
    """
    shape, stride, local, shared, cuts = parameter.shape, parameter.stride(), parameter.detach(), None, ()
    if isinstance(local, DTensor):
        shared, cuts = Shared(local.device_mesh, tuple(local.placements)), part_of("graph_fsdp", local).cuts
        local = local.to_local()
    where = _where(mesh, local, mp_policy, shared, cuts)
    sizes, rank = where.rows.sizes, where.rows.rank
    # a copy: a view would keep the whole parameter alive
    own = local.narrow(0, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
    whole_mesh, placements = _whole_placements(mesh, shared)
    whole = DTensor.from_local(own, whole_mesh, placements, run_check=False, shape=shape, stride=stride)
    return in_place_of(parameter, whole), where


def gather(parameter: Tensor, where: Where) -> Tensor:
    """The whole parameter in the dtype in which it is used; with tensor parallel ranks, a DTensor on their mesh."""
    whole = fsdp_gather(parameter.to_local(), where.dtype, where.rows)
    if (shared := where.shared) is None:
        return whole
    return DTensor.from_local(
        whole, shared.mesh, shared.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
