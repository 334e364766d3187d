"""Convert a DTensor to this rank's shard and back; placements become a `DimSharding` per mesh dim.

A mesh dim that does not shard has None instead. If several mesh dims have ``Shard(d)`` with the same d, each of them
shards the shard of the mesh dim before, as DTensor defines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding, Sharding, chunk_sizes
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.layer.sharded_gemm import GroupPlan

__all__ = ["check_one_mesh", "cuts_of", "part_of", "placements_of", "whole_of"]


def _check_placement(function: str, tensor: DTensor, placement: Placement) -> None:
    # exact types, because the placement of a flattened view is a subclass of Shard with another order of elements
    if type(placement) not in (Shard, Replicate, Partial):
        raise ValueError(
            f"{function}: a tensor has placements {tensor.placements}, but FP8 ops only support Shard, Replicate and "
            "Partial. Call .redistribute() with one of these placements first. If a view flattened a sharded dim "
            "(_StridedShard), pass the tensor from before the view to the layer."
        )


def _group_and_rank(mesh: DeviceMesh, index: int, *, is_meta: bool) -> tuple[ProcessGroup | None, int]:
    """Return the process group of mesh dim ``index``, and this rank's number in it.

    The group is None if the mesh has no groups, which is allowed for tensors on the meta device (``is_meta``).
    """
    if is_meta and not _compat.has_groups(mesh):
        return None, mesh.get_coordinate()[index]  # type: ignore[index]  # this rank is on the mesh
    return mesh.get_group(index), mesh.get_local_rank(index)


def cuts_of(tensor: DTensor) -> Sharding:
    """Return how each mesh dim shards a DTensor; None for a mesh dim that does not shard it.

    The placements are Shard, Replicate or Partial; partial sums count as summed. On the meta device, the mesh needs no
    process groups.
    """
    mesh, sizes = tensor.device_mesh, list(tensor.shape)
    cuts: list[DimSharding | None] = []
    for index, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            cuts.append(None)
            continue
        dim, (group, rank) = placement.dim % tensor.ndim, _group_and_rank(mesh, index, is_meta=tensor.is_meta)
        cut = DimSharding(group, rank, dim, chunk_sizes(sizes[dim], mesh.size(index)))
        sizes[dim] = cut.length
        cuts.append(cut)
    return tuple(cuts)


def part_of(function: str, tensor: DTensor) -> Plain:
    """Return this rank's shard of a DTensor, and how ranks shard it. Partial sums are reduced first.

    Raise a ValueError that names ``function`` for placements other than Shard, Replicate and Partial.
    """
    for placement in tensor.placements:
        _check_placement(function, tensor, placement)
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    with torch.no_grad():  # else a view for autograd stands in the graph, and hides that two layers read one tensor
        local = tensor.to_local()
    return Plain(local, TensorLayout(cuts_of(tensor)))


def whole_of(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the contiguous DTensor of shape ``shape`` whose shard on this rank is ``local``."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local.contiguous(), mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=stride
    )


def placements_of(plans: Sequence[GroupPlan], dims: dict[str, Sequence[int]]) -> list[Placement]:
    """Return the placements of a GEMM's result; ``plans`` says for each mesh dim what its ranks have of the result.

    Where they have rows, the result is sharded along ``dims["m"][i]``, i being the mesh dim; for columns along
    ``dims["n"][i]``.
    """
    found: list[Placement] = []
    for index, plan in enumerate(plans):
        if plan.out is None:
            found.append(Replicate())
        elif plan.out == "sum":
            found.append(Partial())
        else:
            found.append(Shard(dims[plan.out][index]))
    return found


def check_one_mesh(function: str, tensors: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh that all ``tensors`` are on; entries that are None are skipped.

    Raise a TypeError if only some tensors are DTensors, and a ValueError for DTensors on different meshes. Errors name
    ``function`` and the keys of ``tensors``.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    plain = [name for name, tensor in given.items() if not isinstance(tensor, DTensor)]
    placed = [name for name in given if name not in plain]
    if plain:
        raise TypeError(
            f"{function}: {', '.join(placed)} {'is a DTensor' if len(placed) == 1 else 'are DTensors'}, but "
            f"{', '.join(plain)} {'is' if len(plain) == 1 else 'are'} not. Shard the full layer, with "
            "torch.distributed.tensor.distribute_tensor, DTensor.from_local or parallelize_module."
        )
    mesh = given[placed[0]].device_mesh
    for name in placed[1:]:
        if given[name].device_mesh != mesh:
            raise ValueError(
                f"{function}: {placed[0]} is on mesh {mesh}, but {name} is on {given[name].device_mesh}. All "
                "tensors must be on the same mesh."
            )
    return mesh
