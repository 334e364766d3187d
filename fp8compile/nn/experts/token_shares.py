"""Tokens that several ranks share, such as tensor parallel ranks: each sends its share of them to the experts.

    all tokens --own_share--> (tokens / R, ...) --experts, wherever they are--> --all_shares--> all tokens, everywhere

Sent by all R ranks, each token would count R times in the experts' gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Size, Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["all_shares", "own_share"]


def own_share(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a tensor that all ranks have.

    Args:
        tensor: (tokens, ...), the same on all ranks of the mesh.
        mesh: One dim.

    Returns:
        (about tokens / R, ...). Gradients of all shares become that of the whole, on each rank.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def all_shares(local: Tensor, mesh: DeviceMesh, tokens: int) -> Tensor:
    """Gather the rows of all ranks to the whole tensor, on each rank.

    Args:
        local: (about tokens / R, features), as `own_share` cut them.
        mesh: One dim.
        tokens: Rows of the whole.

    Returns:
        (tokens, features). Its gradient, the same on all ranks, is cut likewise.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = Size((tokens, local.shape[1]))
    parts = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return parts.redistribute(placements=[Replicate()]).to_local()
