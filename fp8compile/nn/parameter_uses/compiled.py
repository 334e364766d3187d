"""Find out from Dynamo's graphs, before they are compiled, what a forward does with parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile._compat import HigherOrderOperator
from fp8compile.nn.parameter_uses.flow import DATA, Value, result_of
from fp8compile.nn.parameter_uses.owners import Owners, memory_of
from fp8compile.nn.parameter_uses.uses import Uses

__all__ = ["uses_in_graph"]

NUMBERS = int, float, torch.SymInt, torch.SymFloat


def uses_in_graph(graph: fx.GraphModule, inputs: Sequence[Any], owners: Owners, traced: type[Any]) -> Uses:
    """Return how a graph that Dynamo made uses the parameters among its inputs.

    ``inputs`` are in the order of the placeholders. ``traced`` is the class whose method was traced; the report names
    this method for nodes without an ``nn_module_stack``.
    """
    given = [_value_of_input(each, owners) for each in inputs]
    reading = _Reading(traced)
    if any(given):
        reading.follow(graph, given)
    return reading.uses


def _value_of_input(given: Any, owners: Owners) -> Value:
    memory = memory_of(given) if isinstance(given, Tensor) else None
    return DATA if memory is None else owners.of(memory, given)


class _Reading:
    """Follows parameters through the nodes of a graph and its subgraphs, and collects their uses."""

    def __init__(self, traced: type[Any]) -> None:
        self.traced, self.uses = traced, Uses()

    def follow(self, graph: fx.GraphModule, given: Sequence[Value]) -> None:
        values: dict[fx.Node, Value] = {}
        inputs = iter(given)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs, DATA)
            elif node.op in ("call_function", "call_method"):
                values[node] = self._called(graph, node, values)

    def _called(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
        """Record how a node uses parameters; return the parameters of which its result is a form, or None for data.

        ``values`` maps each earlier node to parameters or None in the same way; `flow.py` defines form and data.
        """
        given: list[fx.Node] = []  # a node that is given twice is in the list twice
        fx.map_arg((node.args, node.kwargs), given.append)
        arguments = [each for each in given if each in values]
        if all(values[each] is DATA for each in arguments):
            return DATA
        known = [values[each] for each in arguments if not isinstance(each.meta.get("example_value"), NUMBERS)]
        value, met = result_of(node.target, known)
        inner = next(_graphs_in(graph, node), None) if isinstance(node.target, HigherOrderOperator) else None
        if inner is not None:  # the inputs of the inner graph are the last arguments
            count = len(inner.graph.find_nodes(op="placeholder"))
            self.follow(inner, [values[each] for each in arguments[max(len(arguments) - count, 0) :]])
        else:
            self.uses.note(met, self._method_of(node))
        return value

    def _method_of(self, node: fx.Node) -> str:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        cls = stack[-1][1] if stack else self.traced
        name = cls.rpartition(".")[2] if isinstance(cls, str) else cls.__name__
        return f"{name}.forward"


def _graphs_in(graph: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the subgraphs among a node's arguments, such as the body of a checkpoint."""
    for each in node.all_input_nodes:
        if each.op == "get_attr" and isinstance(found := getattr(graph, str(each.target), None), fx.GraphModule):
            yield found
