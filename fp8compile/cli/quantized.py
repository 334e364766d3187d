"""Weights that are codes, of `fp8compile train --quantized-parameters`, and what their float32 masters start from.

drawn float32 --bfloat16--> codes, of which ranks have parts          masters <-- the same parts of what was drawn
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8compile.cli.checkpoint import plain_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["give_drawn", "take_drawn"]


def take_drawn(layers: dict[str, nn.Linear], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of layers by their names in the model, and put them in another dtype, in place.

    Args:
        layers: By their names in the model; not converted yet.
        dtype: In which they are to become codes.
    """
    drawn = {f"{name}.weight": layer.weight.detach() for name, layer in layers.items()}
    for layer in layers.values():
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype))
    return drawn


def give_drawn(model: nn.Module, drawn: dict[str, Tensor]) -> None:
    """Tell quantized parameters what they were drawn as, for the masters that are made next.

    Not by ``keep_initial`` of ``fp8compile.convert``: FSDP2 would take parts of the codes alone.

    Args:
        model: After it was sharded, if it is.
        drawn: Of :func:`take_drawn`.
    """
    for name, parameter in model.named_parameters():
        values = drawn.get(plain_name(name))
        if values is None:
            continue
        local = parameter
        if isinstance(parameter, DTensor):
            whole = values.to(parameter.device)
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            local = parameter._local_tensor
        local.initial = values.to("cpu", torch.float32)
