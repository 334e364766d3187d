"""Broadcast one rank's parameters to the other ranks, quantized ones as codes and scales.

DistributedDataParallel can broadcast only plain parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from fp8compile.nn.check_model import Model, check_model
from fp8compile.tensor import count_write, has_codes, is_quantized_parameter

__all__ = ["broadcast_parameters"]


def _take_initial(parameter: Any, group: ProcessGroup | None, source: int) -> None:
    """Broadcast the values that a quantized parameter had before quantization, if it has kept them.

    Master weights start from these values. ``source`` is the sending rank. Also set the parameter's ``written``.
    """
    parameter.written = True
    if parameter.initial is not None:
        values = parameter.initial.to(parameter.device)
        distributed.broadcast(values, group=group, group_src=source)
        parameter.initial.copy_(values)


def broadcast_parameters(model: Model, *, group: ProcessGroup | None = None, source: int = 0) -> Model:
    """Broadcast parameters and buffers from one rank; quantized parameters are sent as FP8 data and scales.

    ``DistributedDataParallel`` can't broadcast quantized parameters. Call this function first, then
    ``DistributedDataParallel(model, init_sync=False)``, which skips the broadcast. Create optimizers after this call,
    so that the float32 masters of ``fp8compile.MasterWeights`` start from the source rank's values. Weights cached by
    ``weight_lifetime="step"`` are requantized, as after any write.

    Args:
        model: A model with the same parameters on all ranks, all of which must call this.
        group: The ranks; all ranks by default.
        source: Rank within the group whose parameters are sent.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
    """
    check_model("broadcast_parameters", model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            parts: Any = tensor.parts() if has_codes(tensor) else [tensor.detach()]
            for part in parts:
                distributed.broadcast(part, group=group, group_src=source)
            count_write(tensor)
            if is_quantized_parameter(tensor):
                _take_initial(tensor, group, source)
    return model
