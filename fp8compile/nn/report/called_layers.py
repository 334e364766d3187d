"""Find the converted layers that a forward of a model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fp8compile.nn.convertible.convertible_layers import is_converted, method_of
from fp8compile.nn.parameter_uses.first_forward import watched
from fp8compile.nn.parameter_uses.past_forward import settled
from fp8compile.nn.parameter_uses.uses import Uses

__all__ = ["called_layers"]


@contextmanager
def _recorded(layer: nn.Module, called: set[nn.Module]) -> Iterator[None]:
    """Context that adds ``layer`` to ``called`` if code inside it runs the method with the layer's GEMMs."""
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
    """Run a forward; return the converted layers that it calls, and how operators in high precision use parameters.

    A module of experts counts as called if its FP8 GEMMs run. The forward runs in eager mode, because calls inside a
    compiled graph can't be recorded.
    """
    called: set[nn.Module] = set()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in {module for module in model.modules() if is_converted(module)}:
            stack.enter_context(_recorded(layer, called))
        watching = stack.enter_context(watched(model))
        forward()
    return called, settled(watching.uses, watching.owners)
