"""Finds the converted layers that a forward of a model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fp8compile.nn.candidates import is_converted, method_of
from fp8compile.nn.parameter_uses import Uses, settled, watched

__all__ = ["called_layers"]


@contextmanager
def _recorded(layer: nn.Module, called: set[nn.Module]) -> Iterator[None]:
    """Record each call of the method that multiplies, even if it bypasses ``__call__`` and its hooks."""
    name = method_of(layer)
    method, own = getattr(layer, name), vars(layer).get(name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(layer)
        return method(*args, **kwargs)

    setattr(layer, name, noted)
    try:
        yield
    finally:
        if own is None:
            delattr(layer, name)
        else:
            setattr(layer, name, own)


def called_layers(model: nn.Module, forward: Callable[[], object]) -> tuple[set[nn.Module], Uses]:
    """The converted layers of a model that a function calls, and what it does with parameters in high precision.

    Of experts, those whose product in FP8 it calls.

    Nothing is compiled and nothing compiled runs meanwhile: a graph would not tell, and would be compiled anew.

    Args:
        model: Any module.
        forward: Calls it.
    """
    called: set[nn.Module] = set()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in {module for module in model.modules() if is_converted(module)}:
            stack.enter_context(_recorded(layer, called))
        watching = stack.enter_context(watched(model))
        forward()
    return called, settled(watching.uses, watching.owners)
