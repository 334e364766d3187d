"""Private interfaces of DTensor: local tensors, placements and cache keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "dtensor_of",
    "forget_meshes",
    "is_dtensor",
    "local_itself",
    "placement_of",
    "replicated",
    "scattered_like",
    "set_local_itself",
    "tell_apart_by_local_tensors",
]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, told by its class name, because importing DTensor costs half a second."""
    return type(tensor).__name__ == "DTensor"


def tell_apart_by_local_tensors() -> None:
    """Include the local tensor's key in AOTAutograd's cache key of a DTensor, if the local tensor has one.

    PyTorch's key has only placements (2.13, 2.15). A DTensor of codes would otherwise run code that was compiled for a
    DTensor of plain numbers, and crash the process.
    """
    from torch.distributed.tensor import DTensor

    original = getattr(DTensor, "_stable_hash_for_caching", None)
    if original is None:  # 2.11
        return

    def key(self: torch.Tensor) -> str:
        local = getattr(local_itself(self), "_stable_hash_for_caching", None)
        return original(self) if local is None else f"{original(self)}-{local()}"

    DTensor._stable_hash_for_caching = key


def forget_meshes() -> None:
    """Clear DTensor's cache of result placements, whose entries hold meshes.

    Meshes of the same ranks compare equal. If a new mesh replaces one whose process groups were destroyed, the cache
    would return the old mesh.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def local_itself(tensor: Any) -> Any:
    """Return the tensor object inside a DTensor; any other tensor is returned unchanged.

    ``to_local()`` may return a view of this object.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Wrap ``local`` in a DTensor with ``spec``, the ``_spec`` of another DTensor."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


def set_local_itself(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace a tensor's data, or a DTensor's local tensor, by ``local``."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # the local tensor is a view: setting its .data would keep the old memory alive
    else:
        tensor.data = local


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a replicated DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placement_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the placements of a DTensor; None for any other tensor."""
    return tensor.placements if is_dtensor(tensor) else None


def scattered_like(grad: torch.Tensor | None, placements: tuple[Any, ...] | None) -> torch.Tensor | None:
    """Reduce-scatter an input's gradient over mesh dims where it is a partial sum and the input is sharded.

    ``placements`` are the input's. Without this, a norm before the layer would run its backward on partial sums, and
    ranks would reduce three float32 tensors instead of this gradient.
    """
    if placements is None or grad is None or not is_dtensor(grad):
        return grad
    cut = [
        wanted if own.is_partial() and wanted.is_shard() else own
        for own, wanted in zip(grad.placements, placements, strict=True)
    ]
    return grad if cut == list(grad.placements) else grad.redistribute(placements=cut)
