"""Which converted layers a forward of a model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fp8compile.nn.candidates import is_converted

__all__ = ["called_layers"]


@contextmanager
def _recorded(layer: nn.Module, called: set[nn.Module]) -> Iterator[None]:
    """Note each call of a layer's forward, also one that goes past ``__call__`` and its hooks."""
    forward, own = layer.forward, vars(layer).get("forward")

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(layer)
        return forward(*args, **kwargs)

    layer.forward = noted
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


def called_layers(model: nn.Module, forward: Callable[[], object]) -> set[nn.Module]:
    """The converted layers of a model that a function calls.

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
        forward()
    return called
