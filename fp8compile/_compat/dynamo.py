"""Private interfaces of Dynamo: a callback for each graph before it goes to the backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fp8compile._compat.imports import when_imported

__all__ = ["when_graph_is_made"]


def when_graph_is_made(callback: Callable[[fx.GraphModule, Sequence[Any], object], None]) -> None:
    """Call ``callback`` for each graph that Dynamo makes.

    Its arguments are the graph, the graph's inputs, and ``self`` of the traced method. The call comes before the
    backend and before all caches of compiled code. An error that ``callback`` raises ends the compilation.
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
