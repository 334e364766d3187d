"""Clip gradients by their norm in a model whose parameters are on several meshes, or on none.

`torch.nn.utils.clip_grad_norm_` raises for such a model, because no operator of DTensor takes two meshes. It also
raises for the infinity norm if a rank's shard of a parameter is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fp8compile.ops.collectives import all_reduce, all_reduce_extreme
from fp8compile.tensor import shown

__all__ = ["clip_grad_norm_"]

Place = tuple[DeviceMesh, tuple[int, ...]]  # a mesh, and the dims of the mesh over which a parameter is cut


def _place(parameter: nn.Parameter) -> Place | None:
    """Return a parameter's mesh and the mesh dims that shard it; None for a parameter that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return None
    cut = (index for index, each in enumerate(parameter.placements) if not each.is_replicate())
    return parameter.device_mesh, tuple(cut)


def _local(grad: Tensor, parameter: Any) -> Tensor:
    """Return this rank's shard of a gradient, with the parameter's placements; a partial sum is reduced first."""
    if not isinstance(grad, DTensor):
        return grad
    if any(each.is_partial() for each in grad.placements):
        grad = grad.redistribute(placements=[Replicate() if each.is_partial() else each for each in grad.placements])
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()


def _norm(parts: Sequence[Tensor], norm_type: float, foreach: bool | None, device: torch.device) -> Tensor:
    """Return the norm of order ``norm_type`` of this rank's shards ``parts``, taken as one vector.

    If all shards are empty, return 0 on ``device``; PyTorch's infinity norm would raise.
    """
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(parts, norm_type, foreach=foreach)


def _over_ranks(norm: Tensor, place: Place, norm_type: float) -> Tensor:
    """Return the norm of order ``norm_type`` over all ranks, from the norm of this rank's shards.

    ``place`` has the mesh, and the mesh dims that shard the parameters.
    """
    mesh, dims = place
    groups = [mesh.get_group(index) for index in dims]
    if norm_type == torch.inf:
        for group in groups:
            norm = all_reduce_extreme(norm, "max", group)
        return norm
    power = norm.double() ** norm_type
    for group in groups:
        power = all_reduce(power, "sum", group)
    return power ** (1 / norm_type)


def _check(model: object, max_norm: object, norm_type: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"clip_grad_norm_: `model` is {shown(model)}; it must be a torch.nn.Module.")
    if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: `max_norm` is {shown(max_norm)}; it must be a number of at least 0.")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_: `norm_type` must be a number above 0, or float('inf'), got {shown(norm_type)}."
        )


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of a model's gradients, computed over all ranks and meshes, to ``max_norm``.

    The result equals that of ``torch.nn.utils.clip_grad_norm_`` on the full model in one process, bit for bit for
    plain parameters. With any combination of tensor, expert and data parallelism, each element counts once. All ranks
    must call this, after gradients that ranks share have been reduced (see `average_expert_gradients`).

    Args:
        model: A model whose parameters are plain tensors, or DTensors on any number of meshes.
        max_norm: Maximum norm of the gradients.
        norm_type: Order of the norm, above 0; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: Whether to raise an error if the norm is infinite or NaN. If False, gradients are scaled by
            it.
        foreach: Whether to use the foreach implementation; None lets PyTorch choose.

    Returns:
        The norm before clipping, shape (), the same on all ranks, in the dtype of the gradients.

    Raises:
        TypeError: The model is not a module.
        ValueError: ``max_norm`` is not a number of at least 0, or ``norm_type`` is not a number above 0.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is True.
    """
    _check(model, max_norm, norm_type)
    by_place: dict[Place | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        # parameters without a gradient are included, because ranks may differ in which have one
        by_place.setdefault(_place(parameter), []).append(parameter)
    grads = [parameter.grad for own in by_place.values() for parameter in own if parameter.grad is not None]
    norms = []
    for place, own in by_place.items():
        parts = [_local(parameter.grad, parameter) for parameter in own if parameter.grad is not None]
        norm = _norm(parts, norm_type, foreach, own[0].device)
        norms.append(norm if place is None else _over_ranks(norm, place, norm_type))
    total = _total(norms, norm_type, grads)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of all gradients is {total.item()}. To clip with a norm "
            "that is not finite instead of raising an error, omit error_if_nonfinite."
        )
    for own in by_place.values():  # for one mesh at a time, because no operator of DTensor takes two
        nn.utils.clip_grads_with_norm_(own, max_norm, total, foreach)
    return total


def _total(norms: Sequence[Tensor], norm_type: float, grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients from ``norms`` of groups of gradients, in the dtype of ``grads``."""
    if not norms:
        return torch.tensor(0.0)
    first, *others = norms
    if others:
        first = torch.linalg.vector_norm(torch.stack([norm.to(first.device).double() for norm in norms]), norm_type)
    return first.to(reduce(torch.promote_types, {grad.dtype for grad in grads})) if grads else first
