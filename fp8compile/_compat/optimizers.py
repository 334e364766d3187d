"""Private functions of torch.optim, and a separately compiled graph for an optimizer's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled_alone", "muon_lr", "orthogonalized"]


def compiled_alone(function: Callable[..., Any], first: object, backend: Any) -> Callable[..., Any]:
    """Compile ``function`` with its first argument fixed, as one graph of static sizes.

    From 2.13 on, the graphs of this call do not count against Dynamo's recompile limit for ``function``.
    """
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    if backend != "inductor":  # torch.compile's own default, which tests replace by a cheaper backend
        options["backend"] = backend
    return partial(torch.compile(function, fullgraph=True, dynamic=False, **options), first)


def orthogonalized(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The orthogonal matrix nearest to an update (N, K), bfloat16, by PyTorch's Newton-Schulz iteration."""
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)


def muon_lr(lr: float, adjustment: str | None, shape: Sequence[int]) -> float:
    """The learning rate of a matrix of this shape, by ``adjust_lr_fn`` of torch.optim.Muon."""
    from torch.optim import _muon

    return _muon._adjust_lr(lr, adjustment, torch.Size(shape))
