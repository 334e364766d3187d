"""Parameters of one rank to all others: what DistributedDataParallel does itself for plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from fp8compile.tensor import count_write, has_codes, is_quantized_parameter

__all__ = ["broadcast_parameters"]


def _take_initial(parameter: Tensor, group: ProcessGroup | None, source: int) -> None:
    """Have masters start from those of the rank that gives: from what its codes were made of, where that is kept."""
    parameter.written = True
    if parameter.initial is not None:
        values = parameter.initial.to(parameter.device)
        distributed.broadcast(values, group=group, group_src=source)
        parameter.initial.copy_(values)


def broadcast_parameters(model: nn.Module, *, group: ProcessGroup | None = None, source: int = 0) -> nn.Module:
    """Give all ranks one rank's parameters and buffers: of quantized ones, codes and scale as they are.

    ``DistributedDataParallel`` would put values of all parameters in one message, which quantized ones have not. After
    this, tell it that they are the same: ``DistributedDataParallel(model, init_sync=False)``. Make
    optimizers afterwards: masters (``fp8compile.MasterWeights``) start from what the one rank has.

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
            parts = tensor.parts() if is_codes else [tensor.detach()]
            for part in parts:
                distributed.broadcast(part, group=group, group_src=source)
            if is_codes:
                count_write(tensor)
            if is_quantized_parameter(tensor):
                _take_initial(tensor, group, source)
    return model
