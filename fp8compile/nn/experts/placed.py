"""Experts that are spread over ranks: which ranks, as the placements of their parameters say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8compile._compat import is_dtensor

__all__ = ["DispatchOptions", "group_of_experts", "local_stack"]


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How rows travel to the ranks of their experts.

    Attributes:
        capacity: How many rows a rank may send to another; None: as many as there are.
        codes: Whether codes of the recipe travel, where all products that read the rows take codes.
    """

    capacity: int | None = None
    codes: bool = True


def group_of_experts(stack: Tensor) -> ProcessGroup | None:
    """The ranks over which experts are spread, or None: each rank has all of them.

    Args:
        stack: A parameter (experts, ...).
    """
    if not is_dtensor(stack):
        return None
    mesh = stack.device_mesh
    groups = [mesh.get_group(index) for index, each in enumerate(stack.placements) if each.is_shard(0)]
    return groups[0] if groups else None


def local_stack(module: nn.Module, name: str) -> Tensor:
    """What this rank has of a parameter of experts."""
    stack = getattr(module, name)
    return stack.to_local() if is_dtensor(stack) else stack
