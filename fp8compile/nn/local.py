"""A local tensor in place of another one's, whether FSDP2 has spread that over ranks or not."""

from __future__ import annotations

from torch import Tensor

from fp8compile._compat import is_dtensor

__all__ = ["wrapped_like"]


def wrapped_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A local tensor spread over ranks as another tensor is, if that is."""
    if not is_dtensor(tensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return type(tensor).from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
