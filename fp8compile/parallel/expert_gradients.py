"""Average gradients of experts that are spread over ranks, and check that FSDP shards over other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8compile._compat import root_mesh
from fp8compile.nn.experts.spread_over_ranks import is_spread
from fp8compile.tensor import shown

__all__ = ["average_expert_gradients", "check_meshes", "expert_parameters", "has_no_other_ranks"]


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of experts that are spread over ranks, by name, in the same order on all ranks."""
    return {
        f"{prefix}.{name}".strip("."): parameter
        for prefix, module in model.named_modules()
        if is_spread(module)
        for name, parameter in module.named_parameters(recurse=False)
    }


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `ExpertParallel` or `spread_experts` has sharded over ranks.

    If FSDP runs over the same ranks, pass these parameters as ``ignored_params`` to ``fsdp_float8_all_gather``,
    ``fully_shard`` or ``graph_fsdp``. Call this after sharding the experts.

    Args:
        model: A model. Without expert parallelism the set is empty.
    """
    return set(_named(model).values())


def average_expert_gradients(model: nn.Module, parts: int, *, replicas: ProcessGroup | None = None) -> None:
    """Divide the gradients of sharded experts by the number of parts of the batch, in place.

    Each part of the batch has its own mean loss. An expert's gradient is a sum over rows from all parts; divided by
    the number of parts, it is the gradient of the mean loss over the full batch. Call this after the last backward of
    each step.

    Args:
        model: A model with experts sharded by `ExpertParallel` or `spread_experts`. Gradients of other parameters do
            not change.
        parts: Number of equal parts into which the batch was split over all ranks whose gradients are summed. It is
            the number of ranks over which experts are sharded (ranks with the same tokens count as one), times the
            number of ranks of ``replicas``. Ranks over which FSDP shards experts don't count, because FSDP computes
            the mean.
        replicas: Ranks that have the same experts but different tokens, whose gradients are summed first. None if FSDP
            sums these gradients, or if no other rank has these experts.

    Raises:
        ValueError: ``parts`` is not a positive int.
    """
    if type(parts) is not int or parts < 1:
        raise ValueError(f"average_expert_gradients: `parts` is {shown(parts)}; it must be an int of at least 1.")
    for parameter in _named(model).values():
        if parameter.grad is None:
            continue
        if replicas is not None:
            grad: Any = parameter.grad  # a DTensor, because its parameter is one
            torch.distributed.all_reduce(grad.to_local(), group=replicas)
        parameter.grad /= parts


def has_no_other_ranks(mesh: DeviceMesh) -> bool:
    """Whether a mesh has all ranks of its root mesh, and no dim of size 1 of the root is left for FSDP."""
    root = root_mesh(mesh)
    own = set(mesh.mesh_dim_names or ())
    others = [size for name, size in zip(root.mesh_dim_names or (), root.mesh.shape, strict=False) if name not in own]
    return mesh.size() == root.size() and (root.ndim == mesh.ndim or 1 not in others)


def check_meshes(
    function: str, model: nn.Module, ignored: Collection[nn.Parameter], mesh: DeviceMesh | None = None
) -> None:
    """Raise a ValueError if FSDP would shard experts over ranks that experts are already spread over.

    ``function`` names the caller in the error. ``ignored`` are the parameters that FSDP does not shard. ``mesh`` is
    FSDP's mesh; None if the mesh is not known yet.
    """

    def overlaps(parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor) or parameter in ignored:
            return False
        own = parameter.device_mesh
        if mesh is None:
            return has_no_other_ranks(own)
        both = set(own.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
        return len(both) > 1 or own == mesh

    if names := [name for name, parameter in _named(model).items() if overlaps(parameter)]:
        raise ValueError(
            f"{function}: {_shown_names(names)} {'is' if len(names) == 1 else 'are'} sharded over ranks by "
            "ExpertParallel, and FSDP would shard over the same ranks. Either exclude experts: pass "
            "ignored_params=fp8compile.parallel.expert_parameters(model) to this function and to each fully_shard, "
            "and divide their gradients with fp8compile.parallel.average_expert_gradients. Or shard them over another "
            "dim of the same mesh: mesh['fsdp'] of init_device_mesh(..., mesh_dim_names=('fsdp', 'ep'))."
        )


def _shown_names(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more parameters" if len(others) > 1 else " and ".join((first, *others))
