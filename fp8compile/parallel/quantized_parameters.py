"""Quantized parameters that FSDP2 has sharded: which ranks have one scale."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile._compat import local_itself
from fp8compile.nn.model_type import Model
from fp8compile.tensor import is_quantized_parameter, share_scale_of_part

__all__ = ["share_scales"]


def share_scales(model: Model) -> Model:
    """Let each shard of a quantized parameter know the ranks that have its scale too.

    ``fully_shard`` makes the shards and does not say; the first forward does. So this is for weights that are written
    to before that, by ``reset_parameters`` after a start on the meta device.

    Args:
        model: After ``fully_shard``.

    Returns:
        The model.

    Raises:
        TypeError: The model is no module.
        RuntimeError: PyTorch 2.11, which can't have a group on a tensor.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"share_scales: model is a {type(model).__name__}; it is a torch.nn.Module.")
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and is_quantized_parameter(local_itself(parameter)):
            share_scale_of_part(parameter)
    return model
