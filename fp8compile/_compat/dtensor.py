"""DTensor's insides: local tensors, placements, and kinds of shards."""

from __future__ import annotations

import torch

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


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor: by name, for its module costs half a second to import."""
    return type(tensor).__name__ == "DTensor"


def tell_apart_by_local_tensors() -> None:
    """Put what a DTensor wraps into the key of AOTAutograd's cache, where that has a key of its own.

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


def local_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor wraps, and any other tensor as it is. ``to_local()`` may return a view of it."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def set_local_itself(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a tensor, or the one that a DTensor wraps, the memory of another one."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # .data of what it wraps, which is a view, would leave the old memory alive
    else:
        tensor.data = local


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """What every rank has of a DTensor that is replicated, and any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def placement_of(tensor: torch.Tensor) -> tuple | None:
    """How a DTensor lies on its mesh; None of any other tensor."""
    return tensor.placements if is_dtensor(tensor) else None


def scattered_like(grad: torch.Tensor | None, placements: tuple | None) -> torch.Tensor | None:
    """The gradient of an input: what is a sum over ranks is cut at once where the input, by its placements, was.

    Left a sum, a norm before the layer would go on with it and have ranks add three float32 tensors in its place.
    """
    if placements is None or not is_dtensor(grad):
        return grad
    cut = [
        wanted if own.is_partial() and wanted.is_shard() else own
        for own, wanted in zip(grad.placements, placements, strict=True)
    ]
    return grad if cut == list(grad.placements) else grad.redistribute(placements=cut)
