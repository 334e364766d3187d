"""Weights from the ranks that train to the process that generates: tensor by tensor, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORMAT = "fine_grained_fp8"


def send(tensors: Iterable[tuple[str, Tensor]], to: int) -> None:
    """Send tensors with their names; rank 0 sends, and the other ranks that train take part in making them."""
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            dist.send_object_list([name, tensor.dtype, tuple(tensor.shape)], dst=to)
            dist.send(tensor.contiguous().view(torch.uint8), dst=to)
    if dist.get_rank() == 0:
        dist.send_object_list([None, None, None], dst=to)


def received() -> Iterator[tuple[str, Tensor]]:
    """What `send` sends."""
    while True:
        header: list = [None, None, None]
        dist.recv_object_list(header, src=0)
        name, dtype, shape = header
        if name is None:
            return
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(tensor.view(torch.uint8), src=0)
        yield name, tensor


def load_codes(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a stream of `fp8compile.export.tensors` into a model whose weights `fp8compile.freeze_weights` made codes.

    A server loads the same tensors by the names of its checkpoints.
    """
    own = model.state_dict()
    for name, tensor in tensors:
        if name.endswith("weight_scale_inv"):
            own[name.replace("weight_scale_inv", "weight_scale")].copy_(tensor)
        elif tensor.dtype == torch.float8_e4m3fn:
            own[f"{name}_codes"].copy_(tensor.view(torch.uint8))
        else:
            own[name].copy_(tensor)
