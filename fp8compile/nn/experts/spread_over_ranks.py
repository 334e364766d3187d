"""Spread experts over ranks (expert parallelism): their parameters become DTensors with ``Shard(0)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8compile._compat import is_dtensor
from fp8compile.nn.layer.tensor_parallel_weights import place_codes
from fp8compile.nn.layer.ungathered_experts import UngatheredStack
from fp8compile.tensor import is_quantized_parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DispatchOptions", "check_mesh", "group_of_experts", "is_spread", "local_stack", "spread_experts"]

SPREAD = "_experts_are_spread"  # attribute of a module whose experts were spread over ranks


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Options of expert parallelism: the capacity of messages, and whether rows travel as codes.

    ``same_tokens`` is a mesh of ranks that all have the same tokens; each of them sends a part of the tokens.
    """

    capacity: int | None = None  # the number of rows that a rank may send to another; None for no limit
    codes: bool = True  # whether to send codes instead of values, if all products that read the rows take codes
    # A mesh whose ranks have the same tokens, so that each rank sends a share of them. None if each rank has its own
    # tokens.
    same_tokens: DeviceMesh | None = None


def check_mesh(function: str, experts: int, mesh: DeviceMesh) -> None:
    """Raise a ValueError unless the mesh has one dim, whose size divides the number of ``experts``.

    ``function`` names the caller in the error.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"{function}: the mesh must have one dimension, got {mesh.ndim}: {mesh.mesh_dim_names}. Pass the dim over "
            "which experts are sharded, such as mesh['ep']."
        )
    if experts % mesh.size():
        raise ValueError(
            f"{function}: {experts} experts can't be divided equally among {mesh.size()} ranks. Use a number of ranks "
            "that divides the number of experts."
        )


def spread_experts(module: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> None:
    """Shard experts over the ranks of a mesh: parameters become DTensors with ``Shard(0)``.

    Use this for a module whose input rows are sorted by expert, as in torchtitan. Its caller sends the rows to the
    ranks of their experts with `expert_routes`. For experts that route tokens themselves, use `ExpertParallel`
    instead.

    Args:
        module: A module whose own parameters are stacked weights, (experts, ...); converted or not. Changed in place.
        mesh: A 1-D mesh. The number of experts must be a multiple of its size.
        src_data_rank: The rank whose values are sent to all ranks; None if each rank keeps a shard of its own values.

    Raises:
        ValueError: The mesh has more than one dim, or the number of experts is not a multiple of the mesh's ranks.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    stacks = list(module.named_parameters(recurse=False))
    for _, stack in stacks:
        check_mesh("spread_experts", stack.shape[0], mesh)
    for name, stack in stacks:
        if is_quantized_parameter(stack):
            place_codes(module, mesh, Shard(0), src_data_rank, name)
            continue
        placed = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        setattr(module, name, nn.Parameter(placed, requires_grad=stack.requires_grad))
    setattr(module, SPREAD, True)


def is_spread(module: nn.Module) -> bool:
    """Whether `spread_experts` gave each rank some of a module's experts."""
    return SPREAD in vars(module)


def group_of_experts(stack: Tensor | UngatheredStack) -> ProcessGroup | None:
    """Return the process group over which stacked weights of experts are spread; None if they are not."""
    if isinstance(stack, UngatheredStack):
        if stack.spread is None:
            return None
        mesh, placements, _ = stack.spread
    elif is_dtensor(stack):
        mesh, placements = stack.device_mesh, stack.placements
    else:
        return None
    groups = [mesh.get_group(index) for index, each in enumerate(placements) if each.is_shard(0)]
    return groups[0] if groups else None


def local_stack(module: nn.Module, name: str) -> Tensor | UngatheredStack:
    """Return this rank's part of the experts' parameter named ``name``.

    Under graph_fsdp this is an `UngatheredStack`, which the grouped GEMMs gather.
    """
    stack = getattr(module, name)
    return stack.to_local() if isinstance(stack, UngatheredStack) or is_dtensor(stack) else stack
