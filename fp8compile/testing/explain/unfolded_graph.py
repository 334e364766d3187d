"""Flattens a graph and its subgraphs (branches, loops, compiled regions) to one list of values.

    graph: x --invoke_subgraph(body, x, w1)--> y --invoke_subgraph(body, y, w2)--> z
    values: x, w1, [body: linear, relu], y, w2, [body: linear, relu], z

The operands of a call are connected to its subgraphs' inputs, and the outputs of its subgraphs (several, if there are
branches) to the call's results. So code that follows a value need not know about subgraphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fp8compile.testing.graphs.recording import op_name

__all__ = ["SAME", "Unfolded", "Value", "unfold"]

SAME = "the same"  # stands for the operator of a value that is equal to one of its inputs


@dataclass(frozen=True, eq=False)
class Value:
    """The result of one call of an operator; a subgraph's node has a value for each call of the subgraph.

    Attributes:
        node: The node.
        op: Name of the operator; `SAME` if the value equals one of its inputs; empty for an input of the graph.
        inputs: Values that this value is computed from, in the order of ``node.all_input_nodes`` for an operator.
        users: Values that are computed from this value.
    """

    node: fx.Node
    op: str
    inputs: tuple[Value, ...] = ()
    users: list[Value] = field(default_factory=list, repr=False)

    def operand(self, index: int) -> Value:
        """The value of the node's argument at position ``index``, which has to be a node."""
        argument: Any = self.node.args[index]
        return self.inputs[self.node.all_input_nodes.index(argument)]

    @property
    def tensors(self) -> list[Tensor]:
        """The fake tensors of the value; several if the operator has several results."""
        return [leaf for leaf in pytree.tree_leaves(self.node.meta.get("val")) if isinstance(leaf, Tensor)]

    @property
    def numel(self) -> int:
        """Number of elements of the value's largest tensor; 0 without tensors."""
        return max((tensor.numel() for tensor in self.tensors), default=0)


@dataclass(frozen=True)
class Unfolded:
    """An unfolded graph.

    Attributes:
        values: All values; each value comes after its inputs.
        outputs: The values that the graph returns, each with AOTAutograd's description of the output (or None).
    """

    values: list[Value]
    outputs: list[tuple[Value, Any]]


def _subgraphs(node: fx.Node) -> list[int]:
    return [
        index
        for index, argument in enumerate(node.args)
        if isinstance(argument, fx.Node)
        and argument.op == "get_attr"
        and isinstance(getattr(node.graph.owning_module, str(argument.target), None), fx.GraphModule)
    ]


class _Unfolding:
    def __init__(self, saved: Mapping[str, Value]) -> None:
        self.saved = saved
        self.values: list[Value] = []

    def add(self, node: fx.Node, op: str, inputs: Sequence[Value]) -> Value:
        value = Value(node, op, tuple(inputs))
        for each in dict.fromkeys(inputs):
            each.users.append(value)
        self.values.append(value)
        return value

    def _called(self, node: fx.Node, env: Mapping[fx.Node, Value]) -> list[Sequence[Value | None]] | None:
        places = _subgraphs(node)
        operands = [leaf for leaf in pytree.tree_leaves(node.args[places[-1] + 1 :]) if not isinstance(leaf, str)]
        matches = not node.kwargs
        results: list[Sequence[Value | None]] = []
        for place in places:
            name_of: Any = node.args[place]
            module = getattr(node.graph.owning_module, name_of.target)
            names = module.graph.find_nodes(op="placeholder")
            if len(names) == len(operands):
                given = [[env[leaf]] if isinstance(leaf, fx.Node) else [] for leaf in operands]
            else:  # each input may then be any of the operands
                matches = False
                given = [[env[each] for each in node.all_input_nodes]] * len(names)
            inner = {name: self.add(name, SAME, inputs) for name, inputs in zip(names, given, strict=True)}
            results.append(self.run(module, inner))
        return results if matches else None

    def run(self, module: fx.GraphModule, env: dict[fx.Node, Value]) -> list[Value | None]:
        results: dict[fx.Node, list[Sequence[Value | None]]] = {}
        for node in module.graph.nodes:
            if node.op == "output":
                leaves = pytree.tree_leaves(node.args[0])
                return [env[leaf] if isinstance(leaf, fx.Node) else None for leaf in leaves]
            if node in env:
                continue
            inputs = [env[each] for each in node.all_input_nodes]
            if node.op == "placeholder":
                of_forward = self.saved.get(node.name)
                env[node] = self.add(node, SAME if of_forward else "", [of_forward] if of_forward else [])
            elif node.op != "call_function":
                env[node] = self.add(node, SAME, [])
            elif node.target is operator.getitem and node.args[0] in results:
                made = [result[node.args[1]] for result in results[node.args[0]] if node.args[1] < len(result)]
                env[node] = self.add(node, SAME, [value for value in made if value is not None])
            elif _subgraphs(node) and (called := self._called(node, env)) is not None:
                results[node] = called
                env[node] = self.add(node, SAME, [])
            else:
                env[node] = self.add(node, op_name(node.target), inputs)
        raise ValueError("explain: the graph has no output node. Pass a graph that AOTAutograd passes to a backend.")


def _described(graph: fx.GraphModule, outputs: Sequence[Value | None]) -> Iterator[tuple[Value, Any]]:
    (output,) = graph.graph.find_nodes(op="output")
    described = output.meta.get("desc") or [None] * len(outputs)
    yield from ((value, desc) for value, desc in zip(outputs, described, strict=False) if value is not None)


def unfold(graph: fx.GraphModule, saved: Mapping[str, Value] | None = None) -> Unfolded:
    """Flatten a graph with its subgraphs.

    Args:
        graph: A forward or backward graph of AOTAutograd.
        saved: For a backward graph, the forward's values by the names of their nodes.
    """
    unfolding = _Unfolding(saved or {})
    outputs = unfolding.run(graph, {})
    return Unfolded(unfolding.values, list(_described(graph, outputs)))
