"""Records inputs, outputs and gradients of each module without children in one forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile.nn.convertible.convertible_layers import is_layer

__all__ = ["ModuleCall", "cloned", "first_tensor", "recorded_calls", "take_gradients", "units", "with_history"]


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        name: Fully qualified name; with a number from the module's second call on.
        module: The module.
        args: Arguments, tensors cloned.
        kwargs: Keyword arguments, tensors cloned.
        output: The first floating tensor that the module returned, cloned.
        grad_output: The gradient of ``output``; None if no gradient reached ``output``.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    grad_output: Tensor | None = None
    _edge: Any = field(default=None, repr=False)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating tensor in a nested value; None if there is none."""
    leaves = (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.is_floating_point())
    return next(leaves, None)


def cloned(value: Any) -> Any:
    """Clone the tensors of a nested value as leaves with the same ``requires_grad``."""

    def clone(tensor: Any) -> Any:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad) if isinstance(tensor, Tensor) else tensor

    return pytree.tree_map(clone, value)


def with_history(value: Any) -> Any:
    """Clone the tensors of a nested value as non-leaves, which a module may change in place.

    Gradients still reach the tensors of ``value``.
    """
    return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, value)


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules to compare, by name: modules without children, and convertible layers such as experts."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if is_layer(module) or not any(module.children()):
            found[name] = module
            inside += (f"{name}.",) if name else ()
    return found


@contextmanager
def recorded_calls(modules: Mapping[str, nn.Module]) -> Iterator[list[ModuleCall]]:
    """Context that yields a list; each call of one of the modules is appended if it returns a tensor."""
    calls: list[ModuleCall] = []
    counts: dict[str, int] = {}
    given: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(cloned((args, kwargs)))  # before the module may change them in place

    def after(name: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            own_args, own_kwargs = given.pop()
            output = first_tensor(result)
            if output is None:
                return
            counts[name] = counts.get(name, 0) + 1
            shown = name if counts[name] == 1 else f"{name} [{counts[name]}]"
            edge = torch.autograd.graph.get_gradient_edge(output) if output.requires_grad else None
            calls.append(ModuleCall(shown, module, own_args, own_kwargs, output.detach().clone(), _edge=edge))

        return record

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after(name), with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def take_gradients(calls: list[ModuleCall], loss: Tensor) -> None:
    """Run the backward of ``loss`` down to the modules' outputs, and set ``grad_output`` of each call."""
    waiting = [call for call in calls if call._edge is not None]
    found = torch.autograd.grad(loss, [call._edge for call in waiting], allow_unused=True) if waiting else ()
    for call, grad in zip(waiting, found, strict=True):
        call.grad_output, call._edge = None if grad is None else grad.detach().clone(), None
