"""DTensor's private interfaces: local tensors, placements, and kinds of shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
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
    """Whether a tensor is a DTensor: by name, for its module costs half a second to import."""
    return type(tensor).__name__ == "DTensor"


def tell_apart_by_local_tensors() -> None:
    """Put the local tensor's key into a DTensor's key in AOTAutograd's cache, if the local tensor has one.

    PyTorch's key holds the placements alone (2.13, 2.15): one that wraps codes met the code compiled for one that
    wraps a plain tensor, and the process died.
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
    """Drop the placements of results that DTensor remembers, with the mesh that they were found on.

    Meshes of the same ranks are equal, so a mesh that is made after groups were destroyed finds results of the mesh
    before it, whose groups are gone.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def local_itself(tensor: Any) -> Any:
    """The tensor that a DTensor wraps; any other tensor itself. ``to_local()`` may return a view instead."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def set_local_itself(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the memory of a tensor, or of the tensor that a DTensor wraps, by another tensor's."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # .data of what it wraps, which is a view, would leave the old memory alive
    else:
        tensor.data = local


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a replicated DTensor; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placement_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Mesh and placements of a DTensor; None for any other tensor."""
    return tensor.placements if is_dtensor(tensor) else None


def scattered_like(grad: torch.Tensor | None, placements: tuple[Any, ...] | None) -> torch.Tensor | None:
    """The gradient of an input; a partial sum is reduced and scattered at once if the input was cut.

    If it stayed a partial sum, the norm before the layer would compute with it, and ranks would add three float32
    tensors instead of one.
    """
    if placements is None or grad is None or not is_dtensor(grad):
        return grad
    cut = [
        wanted if own.is_partial() and wanted.is_shard() else own
        for own, wanted in zip(grad.placements, placements, strict=True)
    ]
    return grad if cut == list(grad.placements) else grad.redistribute(placements=cut)
