"""Quantized parameters that FSDP2 has sharded: which ranks have one scale."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile._compat import local_itself
from fp8compile.tensor import is_quantized_parameter

__all__ = ["share_scales"]


def share_scales(model: nn.Module) -> nn.Module:
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
        local = local_itself(parameter)
        if not isinstance(parameter, DTensor) or not is_quantized_parameter(local):
            continue
        if local.sets()[0].group is not None:  # of tensor parallelism alone, or since a forward
            continue
        # dims of FSDP2 come before that of tensor parallelism, and replicas before shards
        dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        if dims:
            local.share_scale(parameter.device_mesh.get_group(dims[0]), parameter.placements[dims[0]].dim)
    return model
