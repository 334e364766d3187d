"""Store, in quantized parameters that FSDP2 has sharded, which ranks share a scale."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from fp8compile._compat import local_itself
from fp8compile.nn.check_model import Model, check_model
from fp8compile.tensor import is_quantized_parameter, share_scale_of_part

__all__ = ["share_scales"]


def share_scales(model: Model) -> Model:
    """Record in each shard of a quantized parameter which ranks share its scale.

    Otherwise FSDP2's first forward records this. Call this function if you write to weights before the first forward,
    such as with ``reset_parameters`` after initialization on the meta device.

    Args:
        model: A model after ``fully_shard``.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        RuntimeError: PyTorch is version 2.11, whose tensors can't hold a process group.
    """
    check_model("share_scales", model)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and is_quantized_parameter(local_itself(parameter)):
            share_scale_of_part(parameter)
    return model
