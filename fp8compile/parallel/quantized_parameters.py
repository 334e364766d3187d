"""Quantized parameters that FSDP2 has sharded: which ranks have one scale."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fp8compile.tensor import QuantizedParameter

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
        ValueError: A quantized parameter is sharded along another dim than the first, or over two dims of a mesh.
        RuntimeError: PyTorch 2.11, which can't have a group on a tensor.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"share_scales: model is a {type(model).__name__}; it is a torch.nn.Module.")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not isinstance(parameter._local_tensor, QuantizedParameter):
            continue
        dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
        if len(dims) > 1 or any(parameter.placements[dim] != Shard(0) for dim in dims):
            raise ValueError(
                f"share_scales: {name} has placements {parameter.placements}; a quantized parameter is sharded along "
                "dim 0, over one dim of a mesh. With tensor parallelism, leave quantized_parameters out."
            )
        for dim in dims:
            parameter._local_tensor.share_scale(parameter.device_mesh.get_group(dim), 0)
    return model
