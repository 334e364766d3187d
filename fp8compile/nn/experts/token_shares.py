"""Divide tokens that several ranks have, such as tensor parallel ranks: each rank sends a share to the experts.

    all tokens --own_share--> (tokens / R, ...) --experts, wherever they are--> --all_shares--> all tokens, everywhere

If all R ranks sent all tokens, each token would count R times in the experts' gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Size, Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["all_shares", "own_share"]


def own_share(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Cut this rank's share of rows out of a tensor that all ranks have.

    Args:
        tensor: (tokens, ...), the same on all ranks of the mesh.
        mesh: A mesh with one dim.

    Returns:
        (about tokens / R, ...). In the backward, the gradients of all shares are gathered on each rank.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def all_shares(local: Tensor, mesh: DeviceMesh, tokens: int) -> Tensor:
    """Gather the shares of all ranks to the whole tensor, on each rank.

    Args:
        local: (about tokens / R, features), this rank's share as `own_share` cuts it.
        mesh: A mesh with one dim.
        tokens: Number of rows of the whole tensor.

    Returns:
        (tokens, features). Its gradient is the same on all ranks, and each rank cuts its share of it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = Size((tokens, local.shape[1]))
    parts = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return parts.redistribute(placements=[Replicate()]).to_local()
