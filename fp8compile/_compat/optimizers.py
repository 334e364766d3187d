"""Private interfaces of torch.optim, and a separately compiled graph for an optimizer's step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["compiled_alone", "hooks_of", "load_hooks_apart", "muon_lr", "orthogonalized"]


def compiled_alone(function: Callable[..., Any], first: object, backend: Any) -> Callable[..., Any]:
    """Compile ``function`` as one graph of static sizes, and bind ``first`` as its first argument.

    From PyTorch 2.13 on, this graph does not count against Dynamo's recompile limit for ``function``.
    """
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    if backend != "inductor":  # torch.compile's own default, which tests replace by a cheaper backend
        options["backend"] = backend
    return partial(torch.compile(function, fullgraph=True, dynamic=False, **options), first)


def orthogonalized(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalize a Muon update (N, K) by PyTorch's Newton-Schulz iteration, in bfloat16.

    ``coefficients``, ``steps`` and ``eps`` are ``ns_coefficients``, ``ns_steps`` and ``eps`` of torch.optim.Muon.
    """
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)


def muon_lr(lr: float, adjustment: str | None, shape: Sequence[int]) -> float:
    """Return ``lr`` adjusted to a matrix's shape as by torch.optim.Muon with ``adjust_lr_fn=adjustment``."""
    from torch.optim import _muon

    return _muon._adjust_lr(lr, adjustment, torch.Size(shape))


def hooks_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that hold the hooks registered with it, by name."""
    return {name: each for name, each in vars(optimizer).items() if name.startswith("_optimizer_") and "hooks" in name}


@contextmanager
def load_hooks_apart(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Context of an optimizer's own ``load_state_dict``, in which hooks run once and see what PyTorch shows them.

    Pre-hooks run first, on a shallow copy of ``state_dict``; yield what they make of it. Within the context the
    optimizer has no hooks, so that it may call PyTorch's ``load_state_dict``. Post-hooks run last, unless an error
    ends the context.
    """
    before = optimizer._optimizer_load_state_dict_pre_hooks
    behind = optimizer._optimizer_load_state_dict_post_hooks
    state_dict = state_dict.copy()
    for pre_hook in before.values():
        found = pre_hook(optimizer, state_dict)
        state_dict = state_dict if found is None else found
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    optimizer._optimizer_load_state_dict_post_hooks = OrderedDict()
    try:
        yield state_dict
    finally:  # the same objects, to which the handles of hooks point
        optimizer._optimizer_load_state_dict_pre_hooks = before
        optimizer._optimizer_load_state_dict_post_hooks = behind
    for post_hook in behind.values():
        post_hook(optimizer)
