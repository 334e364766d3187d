"""Record the order in which observed layers run, so that a Monitor can name the first operand with a NaN.

Eager calls are recorded as they run. For compiled code, the nodes of Dynamo's graph give the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor, fx

from fp8compile import _compat
from fp8compile._compat import OpOverload

__all__ = ["OBSERVE_OPS", "ExecutionOrder", "note_call"]

OBSERVE_OPS: dict[OpOverload, int] = {}  # for each op that observes, the place of its statistics buffer
EVERY: WeakSet[ExecutionOrder] = WeakSet()


class ExecutionOrder:
    """Records the order in which layers first run; ``buffers`` has one statistics buffer for each observed weight."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = list(buffers)
        self._places: dict[int, int] = {}
        _watch()
        EVERY.add(self)

    def note(self, buffer: Any) -> None:
        """Record that the layer with this statistics buffer runs now, unless the layer has run before."""
        index = next((index for index, each in enumerate(self._buffers) if each is buffer), None)
        if index is not None:
            self._places.setdefault(index, len(self._places))

    def sorted(self) -> list[int]:
        """Return the buffers' indices in the order in which their layers ran, with unused layers last."""
        behind = len(self._buffers)
        return sorted(range(behind), key=lambda index: (self._places.get(index, behind), index))


@cache
def _watch() -> None:
    _compat.when_graph_is_made(_note_graph)


def _note_graph(graph: fx.GraphModule, inputs: Sequence[Any], _: object) -> None:
    if EVERY:
        _note_nodes(graph, list(inputs))


def _note_nodes(graph: fx.GraphModule, inputs: list[Any]) -> None:
    """Record the layers that a graph and its subgraphs run, in node order; ``inputs`` are the graph's inputs."""
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = inputs[len(known)] if len(known) < len(inputs) else None
        elif node.op == "call_function" and node.target in OBSERVE_OPS:
            note_call(known.get(node.args[OBSERVE_OPS[node.target]]))
        elif node.op == "call_function":
            regions = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
            for region in regions:
                inner = getattr(graph, str(region.target), None)
                if isinstance(inner, fx.GraphModule):
                    given = [arg for arg in node.args if isinstance(arg, fx.Node)]
                    of_region = given[given.index(region) + 1 :]
                    _note_nodes(inner, [known.get(each) for each in of_region])


def note_call(buffer: Any) -> None:
    """Record in all `ExecutionOrder` objects that the layer with this statistics buffer runs; ignore None."""
    if buffer is not None:
        for order in EVERY:
            order.note(buffer)
