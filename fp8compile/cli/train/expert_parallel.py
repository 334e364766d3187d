"""How `fp8compile train --ep` spreads experts: each process has some, and rows travel to the process of theirs.

    each process: its rows of the batch --> router --dispatch--> its experts --combine--> its rows

What is no expert all processes have, or with --fsdp a part of it. With --tp the processes that cut the attention have
the same rows, and each sends its share of them. Gradients of an expert come from the rows of all processes, each of
which has the loss of its own part of the batch: their sum, divided by the parts, is that of the mean loss. Of more
processes than --ep, those with the same experts sum their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8compile.cli.train.experts import MixtureOfExperts
from fp8compile.nn.experts.placed import spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_gradients", "cut_experts", "expert_parameters", "mean_gradients"]


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


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all experts."""
    return {stack for layer in _mixtures(model) for stack in layer.experts.parameters()}


def mean_gradients(model: nn.Module, parts: int, replicas: ProcessGroup | None) -> None:
    """Make gradients of experts those of the mean loss over the parts of the batch, as FSDP2 does for the others.

    Args:
        model: With experts that are spread over ranks.
        parts: Of the batch.
        replicas: The ranks that have the same experts as this one; None if no other has.
    """
    stacks = [stack for layer in _mixtures(model) for stack in layer.experts.parameters()]
    for stack in stacks:  # in one order on all ranks
        if stack.grad is None:
            continue
        if replicas is not None:
            torch.distributed.all_reduce(stack.grad.to_local(), group=replicas)
        stack.grad /= parts


def clip_gradients(model: nn.Module, most: float) -> None:
    """Scale all gradients so that their norm together is at most ``most``.

    Norms of parameters on several meshes are taken mesh by mesh: no operator of DTensor takes two.
    """
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for parameters in by_mesh.values():
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for parameters in by_mesh.values():
        nn.utils.clip_grads_with_norm_(parameters, most, total)
