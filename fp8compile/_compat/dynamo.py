"""Dynamo's graphs, on their way from the tracer to the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8compile._compat.imports import when_imported

__all__ = ["when_graph_is_made"]


def when_graph_is_made(callback: Callable[[fx.GraphModule, Sequence[Any], object], None]) -> None:
    """Call ``callback`` with each graph that Dynamo makes, its inputs, and the ``self`` of the method that it traced.

    That is before the backend, and before every cache of what backends make. What it raises ends the compilation.
    """

    def register() -> None:
        from torch._dynamo.output_graph import OutputGraph

        plain = OutputGraph.call_user_compiler

        @functools.wraps(plain)
        def seen_first(self: Any, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
            callback(gm, example_inputs, self.local_scope.get("self"))
            return plain(self, gm, example_inputs)

        OutputGraph.call_user_compiler = seen_first

    when_imported("torch._dynamo.output_graph", register)
