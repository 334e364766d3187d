"""Place a tensor on ranks as another tensor is placed."""

from __future__ import annotations

from torch import Tensor

from fp8compile._compat import is_dtensor

__all__ = ["on_all_ranks_of", "redistribute_like", "wrapped_like"]


def wrapped_like(local: Tensor, tensor: Tensor, whole: Tensor | None = None) -> Tensor:
    """Wrap ``local`` as a DTensor placed like ``tensor``; return ``local`` if ``tensor`` is no DTensor.

    The DTensor has the shape and strides of ``whole``, or by default of ``tensor``.
    """
    if not is_dtensor(tensor):
        return local
    mesh, placements, whole = tensor.device_mesh, tensor.placements, tensor if whole is None else whole
    return type(tensor).from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def redistribute_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return ``whole``, which every rank has, as a DTensor placed like ``tensor``; nothing is sent."""
    if not is_dtensor(tensor) or is_dtensor(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(whole.to(tensor.device), mesh, placements, src_data_rank=None)


def on_all_ranks_of(weight: Tensor, tensor: Tensor) -> Tensor:
    """Wrap ``tensor`` as a replicated DTensor on a weight's mesh; return ``tensor`` if the weight is no DTensor."""
    if not is_dtensor(weight):
        return tensor
    from torch.distributed.tensor import Replicate

    mesh = weight.device_mesh
    return type(weight).from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
