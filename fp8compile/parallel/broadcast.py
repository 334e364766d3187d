"""Parameters of one rank to all others: what DistributedDataParallel does itself for plain ones."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from fp8compile.tensor import count_write, has_codes

__all__ = ["broadcast_parameters"]


def broadcast_parameters(model: nn.Module, *, group: ProcessGroup | None = None, source: int = 0) -> nn.Module:
    """Give all ranks one rank's parameters and buffers: of quantized ones, codes and scale as they are.

    ``DistributedDataParallel`` would put values of all parameters in one message, which quantized ones have not. After
    this, tell it that they are the same: ``DistributedDataParallel(model, init_sync=False)``.

    Args:
        model: With the same parameters on all ranks; all of them call this.
        group: The ranks; all there are, by default.
        source: The number in the group of the rank that gives.

    Returns:
        The model.

    Raises:
        TypeError: The model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"broadcast_parameters: model is a {type(model).__name__}; it is a torch.nn.Module.")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            is_codes = has_codes(tensor)
            sets = tensor.sets() if is_codes else ()
            parts = [part for own in sets for part in (own.codes, own.scale)] if is_codes else [tensor.detach()]
            for part in parts:
                distributed.broadcast(part, group=group, group_src=source)
            if is_codes:
                count_write(tensor)
    return model
