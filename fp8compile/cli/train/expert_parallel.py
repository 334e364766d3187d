"""How `fp8compile train --ep` spreads experts: each process has some, and rows travel to the process of theirs.

    each process: its rows of the batch --> router --dispatch--> its experts --combine--> its rows

What is no expert all processes have, or with --fsdp a part of it. With --tp the processes that cut the attention have
the same rows, and each sends its share of them. Gradients of an expert come from the rows of all processes, each of
which has the loss of its own part of the batch: their sum, divided by the parts, is that of the mean loss. Of more
processes than --ep, those with the same experts sum their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8compile.cli.train.experts import MixtureOfExperts
from fp8compile.nn.experts.placed import spread

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["cut_experts", "parameters_of_mixtures"]


def cut_experts(model: nn.Module, mesh: DeviceMesh, same_tokens: DeviceMesh | None) -> None:
    """Give each rank some of the experts of every layer, in place, with the weights that the first rank has.

    Args:
        model: A ``ByteLlama``, converted or not.
        mesh: Of the ranks that have all experts together, one dim.
        same_tokens: Of the ranks that have this one's rows, one dim; None if no other has.
    """
    for layer in _mixtures(model):
        spread(layer.experts, mesh)
        layer.same_tokens = same_tokens


def _mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    return [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]


def parameters_of_mixtures(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all experts, spread over ranks or not."""
    return {stack for layer in _mixtures(model) for stack in layer.experts.parameters()}
