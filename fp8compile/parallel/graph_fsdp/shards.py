"""Which rows of a parameter each rank has, described by a DTensor and by the `Rows` that ops take.

    mesh dims          placements of the parameter     who has which rows
    shard              Shard(0)                        each rank has other rows
    replicate, shard   Replicate(), Shard(0)           ranks along ``replicate`` have the same rows

The tensor parallel mesh dims and placements of the parameter follow, if there are any; rows are rows of that shard.
`torch.distributed.fsdp.fully_shard` places parameters in the same way, so checkpoints of the two are the same.
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
from fp8compile.ops.layer.fsdp_rows import Rows, placed_of
from fp8compile.parallel.dtensor_placements import part_of
from fp8compile.tensor import in_place_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # importing it needs DTensor, which imports this

__all__ = ["ParameterSharding", "TensorParallelLayout", "gather", "shard_parameter", "used_dtype"]


@dataclass(frozen=True)
class TensorParallelLayout:
    """The tensor parallel mesh of a parameter, and the parameter's placements on it, before FSDP shards."""

    mesh: DeviceMesh  # the tensor parallel mesh
    placements: tuple[Placement, ...]  # placements of the parameter on it


@dataclass(frozen=True)
class ParameterSharding:
    """Which rows of a parameter each rank has, the dtype it is used in, and its tensor parallel layout."""

    dtype: torch.dtype  # dtype in which the parameter is used
    rows: Rows  # rows that each rank has
    # how the parameter lies over tensor parallel ranks, or over ranks that have other experts; None if it is spread
    # over neither
    tensor_parallel: TensorParallelLayout | None = None

    @property
    def experts(self) -> int:
        """For stacked weights of experts: number of experts that FSDP's ranks shard among them."""
        return sum(self.rows.sizes)

    def tensor_parallel_groups(self) -> list[str]:
        """Return the names of tensor parallel groups, one for each dim of the tensor parallel mesh, if any."""
        mesh = None if self.tensor_parallel is None else self.tensor_parallel.mesh
        return [] if mesh is None else [mesh.get_group(index).group_name for index in range(mesh.ndim)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model lies on the same ranks


def used_dtype(sharding: ParameterSharding, tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a weight is used: autocast's if it is on for ``tensor``, else ``sharding.dtype``."""
    return _compat.autocast_dtype(tensor) or sharding.dtype


def _sharding_of(
    mesh: DeviceMesh,
    local: Tensor,
    mp_policy: MixedPrecisionPolicy,
    tensor_parallel: TensorParallelLayout | None,
    cuts: Sharding,
) -> ParameterSharding:
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
    return ParameterSharding(dtype, rows, tensor_parallel)


def _whole_placements(
    mesh: DeviceMesh, tensor_parallel: TensorParallelLayout | None
) -> tuple[DeviceMesh, Sequence[Placement]]:
    """Return the mesh of a sharded parameter, with tensor parallel dims, and its placements on the mesh.

    ``mesh`` is FSDP's. ``tensor_parallel`` is the parameter's placement before FSDP; None without tensor parallelism.
    """
    replicate = (Replicate(),) * (mesh.ndim - 1)
    if tensor_parallel is None:
        return mesh, (*replicate, Shard(0))
    parts = 1
    for index, placement in enumerate(tensor_parallel.placements):
        if placement.is_shard(0):
            parts *= tensor_parallel.mesh.size(index)
    own = Shard(0) if parts == 1 else _compat.strided_shard(0, parts)
    return _compat.concatenated(mesh, tensor_parallel.mesh), (*replicate, own, *tensor_parallel.placements)


def shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
) -> tuple[nn.Parameter, ParameterSharding]:
    """Shard a parameter along dim 0; return a DTensor with this rank's rows, and how it is sharded.

    ``parameter`` is plain, or a DTensor on a tensor parallel mesh, with the same values on all ranks. ``mp_policy``
    has the dtypes for use and for gradients.
    """
    shape, stride, local = parameter.shape, parameter.stride(), parameter.detach()
    layout: TensorParallelLayout | None = None
    cuts: Sharding = ()
    if isinstance(local, DTensor):
        layout = TensorParallelLayout(local.device_mesh, tuple(local.placements))
        cuts = part_of("graph_fsdp", local).cuts
        local = local.to_local()
    sharding = _sharding_of(mesh, local, mp_policy, layout, cuts)
    sizes, rank = sharding.rows.sizes, sharding.rows.rank
    # a copy: a view would keep the whole parameter alive
    own = local.narrow(0, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)
    whole_mesh, placements = _whole_placements(mesh, layout)
    whole = DTensor.from_local(own, whole_mesh, placements, run_check=False, shape=shape, stride=stride)
    return in_place_of(parameter, whole), sharding


def gather(parameter: DTensor, sharding: ParameterSharding) -> Tensor:
    """Gather a parameter over FSDP's ranks, in ``sharding.dtype``.

    Under tensor parallelism, the result is a DTensor on the tensor parallel mesh.
    """
    whole = fsdp_gather(parameter.to_local(), sharding.dtype, sharding.rows)
    if (layout := sharding.tensor_parallel) is None:
        return whole
    return DTensor.from_local(
        whole, layout.mesh, layout.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
