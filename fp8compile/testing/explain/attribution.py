"""Find the layer to which each GEMM of a graph belongs, and which GEMM it is: output, grad_input or grad_weight.

A GEMM belongs to a layer if it multiplies data by a tensor computed from the layer's weight, or if its result leaves
the graph as that weight's gradient. A GEMM of parameters alone computes a weight, and belongs to no layer. If the
weight is no parameter of the graph, the GEMM belongs to the module whose call contains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fp8compile.quantizers import GEMMS
from fp8compile.testing.explain.capture import Recorded
from fp8compile.testing.explain.module_stack import Names, layer_of_stack
from fp8compile.testing.explain.unfolded_graph import SAME, Value, unfold
from fp8compile.testing.explain.weight_flow import (
    LAYER_OPS,
    PRODUCTS,
    Form,
    form_of,
    is_elementwise,
    takes_weight_and_data,
)
from fp8compile.testing.graphs.recording import user_place

__all__ = ["Owners", "Unknown"]

TURNS = frozenset({"aten::t", "aten::transpose", "aten::permute"})
# operators that keep a tensor's numbers, up to rounding; the search for the source of a cast goes through them
SAME_VALUES = TURNS | frozenset({
    SAME, "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias", "aten::detach", "aten::_to_copy",
    "aten::clone", "aten::expand", "aten::squeeze", "aten::unsqueeze",
})  # fmt: skip
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """An opaque operator that takes both a layer's weight and a tensor computed from the model's inputs.

    Attributes:
        layer: Name of the layer.
        op: The operator.
        file: File of the user's code that calls it; empty if unknown.
        line: Line in that file; 0 if unknown.
    """

    layer: str
    op: str
    file: str
    line: int


def _input_index(described: Any) -> int | None:
    """Return the index of the input whose value or gradient an AOTAutograd descriptor is about; else None."""
    while hasattr(described, "base"):
        described = described.base
    return getattr(getattr(described, "grad_of", described), "idx", None)


class Owners:
    """Assigns the GEMMs of one graph, forward and backward, to the layers that own their weights.

    Args:
        recorded: The graph, with the tensors that it was called with.
        weights: Maps each parameter's ``id`` to the layers that use the parameter as weight, or to compute the weight.
        constants: The ``id`` of each of the model's buffers, which don't count as data.
        names: Names of layers and modules.

    Attributes:
        forward: Values of the forward graph.
        backward: Values of the backward graph; empty if there is none.
        needs_grad: Values of the forward that depend on an input or a parameter that requires grad.
    """

    def __init__(
        self, recorded: Recorded, weights: Mapping[int, Sequence[str]], constants: set[int], names: Names
    ) -> None:
        self.names = names
        self.weights: list[tuple[str, ...]] = [tuple(weights.get(id(tensor), ())) for tensor in recorded.inputs]
        self.parameters: list[bool] = [isinstance(tensor, nn.Parameter) for tensor in recorded.inputs]
        self.constants: list[bool] = [
            is_parameter or id(tensor) in constants
            for is_parameter, tensor in zip(self.parameters, recorded.inputs, strict=True)
        ]
        self.forms: dict[Value, Form] = {}
        graph = recorded.kept.forward
        assert graph is not None, "what was recorded has run"
        forward = unfold(graph)
        self._add(forward.values)
        self.forward: list[Value] = forward.values
        self.known: set[str] = {layer for form in self.forms.values() for weight in form.weights for layer in weight}
        self.backward: list[Value] = []
        kept = recorded.kept.backward
        self.backward_graph: fx.Graph | None = None if kept is None else kept.graph
        self.gradients: dict[Value, tuple[str, ...]] = {}
        # nodes of subgraphs are left out, because their names are unique only within the subgraph
        self.named: dict[str, Value] = {v.node.name: v for v in forward.values if v.node.graph is graph.graph}
        if kept is not None:
            backward = unfold(kept, self.named)
            self.backward = backward.values
            for value, described in backward.outputs:
                index = _input_index(described)
                if index is not None and index < len(self.weights) and self.weights[index]:
                    self.gradients[value] = self.weights[index]
            self._add(backward.values)
        self.needs_grad: set[Value] = set()
        for value in self.forward:
            if self._asks_for_grad(value, recorded.inputs):
                self.needs_grad.add(value)
        self.by_sequence: dict[int, list[Value]] = {}
        for value in self.forward:
            if value.op not in ("", SAME) and (number := value.node.meta.get("seq_nr")) is not None:
                self.by_sequence.setdefault(number, []).append(value)

    def _add(self, values: Iterable[Value]) -> None:
        for value in values:
            self.forms[value] = form_of(value, self.forms) if value.op else self._input(value)
            if value.op in PRODUCTS and self._own_call(value) is not None:
                self.forms[value] = Form(is_data=True)

    def _input(self, value: Value) -> Form:
        index = _input_index(value.node.meta.get("desc"))
        if index is None or index >= len(self.weights):
            return Form(is_data=True)
        weights = self.weights[index]
        return Form(frozenset([weights] if weights else []), is_data=not self.constants[index])

    def _asks_for_grad(self, value: Value, inputs: Sequence[Any]) -> bool:
        if value.op and value.op != "aten::detach":
            return not self.needs_grad.isdisjoint(value.inputs)
        index = None if value.op else _input_index(value.node.meta.get("desc"))
        return index is not None and index < len(inputs) and getattr(inputs[index], "requires_grad", False)

    def operands(self, value: Value) -> list[Value]:
        """Return the operands of a GEMM that may be weights: at most one for an FP8 layer's op, both for others."""
        if LAYER_OPS.get(value.op) in (OUTPUT, GRAD_INPUT):
            return [value.operand(1)]
        return [value.operand(index) for index in PRODUCTS.get(value.op, ())]

    def _weights(self, values: Iterable[Value]) -> frozenset[tuple[str, ...]]:
        """Return the weights that ``values`` came from, each as the tuple of names of layers that share it."""
        return frozenset().union(*(self.forms[value].weights for value in values))

    def _own_call(self, value: Value) -> str | None:
        """Return the layer in whose call a GEMM was traced, if just one operand comes from its weight; else None."""
        of_layer = [
            {layer for weight in self.forms[operand].weights for layer in weight} for operand in self.operands(value)
        ]
        called = layer_of_stack(value.node, self.names)
        return called if sum(called in layers for layers in of_layer) == 1 else None

    def _of_forward(self, value: Value) -> list[Value]:
        """Return forward values with a backward value's autograd sequence number; if any are GEMMs, only GEMMs."""
        number: Any = value.node.meta.get("seq_nr")
        candidates = self.by_sequence.get(number, [])
        return [each for each in candidates if each.op in (*PRODUCTS, *LAYER_OPS)] or candidates

    def is_recomputed(self, value: Value) -> bool:
        """Whether the backward graph recomputes a value of the forward, as with activation checkpointing."""
        if value.node.graph is not self.backward_graph:
            # nodes of a subgraph that have no mark of the backward
            meta = value.node.meta
            return bool(meta.get("nn_module_stack")) and not meta.get("fwd_nn_module_stack")
        twin = self.named.get(value.node.name)
        return twin is not None and twin.op == value.op

    def _computes_weights(self, value: Value) -> bool:
        forward = self._of_forward(value)
        return bool(forward) and not any(self.forms[each].is_data for each in forward)

    def _gradient_of(self, value: Value) -> set[tuple[str, ...]]:
        """Return the weights whose gradient is ``value``, a slice of it, or a sum in which it is a term.

        Each weight is a tuple with the names of the layers that share it.
        """
        todo, seen = [value], set()
        while todo:
            value = todo.pop()
            if value not in seen:
                seen.add(value)
                todo += [user for user in value.users if self._hands_on(value, user)]
        return {self.gradients[each] for each in seen if each in self.gradients}

    def _hands_on(self, value: Value, user: Value) -> bool:
        if user.op in SAME_VALUES or user.op == "getitem":
            return True
        if is_elementwise(user):
            return user.numel == value.numel
        is_reduction = torch.Tag.reduction in getattr(user.node.target, "tags", ())
        return len(user.inputs) == 1 and user.op.startswith("aten::") and not is_reduction

    def source(self, value: Value) -> Value:
        """Undo casts, views and saved copies: return the value from which they made ``value``."""
        while value.op in SAME_VALUES and value.inputs:
            value = value.inputs[0]
        return value

    def is_parameter(self, value: Value) -> bool:
        """Whether a value is a parameter, or a copy or view of one."""
        index = _input_index(self.source(value).node.meta.get("desc"))
        return index is not None and index < len(self.parameters) and self.parameters[index]

    def _one_of(self, weight: Sequence[str], node: fx.Node) -> str:
        called = layer_of_stack(node, self.names) if len(weight) > 1 else None
        return called if called is not None and called in weight else weight[0]

    def _called(self, node: fx.Node) -> str | None:
        called = layer_of_stack(node, self.names)
        return None if called in self.known else called

    def whose(self, value: Value, *, backward: bool) -> tuple[list[str | None], str]:
        """Return the layers to which a GEMM belongs ([None] for none), and which GEMM it is, such as "output".

        ``backward`` is whether the GEMM is part of the backward and not recomputed from the forward.
        """
        node, operands = value.node, self.operands(value)
        weights = self._weights(operands)
        gemm = OUTPUT.name
        if not backward:
            # only other products can be products of parameters alone; a layer op always multiplies a weight
            if value.op in PRODUCTS and not self.forms[value].is_data:
                return [None], gemm
        elif self._computes_weights(value):
            return [None], GRAD_INPUT.name
        elif gradient := self._gradient_of(value):
            return [self._one_of(weight, node) for weight in sorted(gradient)], GRAD_WEIGHT.name
        elif weights:
            gemm = GRAD_INPUT.name
        else:
            weights = self._weights(each for product in self._of_forward(value) for each in self.operands(product))
            gemm = GRAD_WEIGHT.name if weights else GRAD_INPUT.name
        if weights:
            return [self._one_of(weight, node) for weight in sorted(weights)], gemm
        # grad_output^T @ x, for a weight that no parameter is known for
        if gemm == GRAD_INPUT.name and operands and operands[0].op in TURNS:
            gemm = GRAD_WEIGHT.name
        return [self._called(node)], gemm

    def unknown(self, value: Value, *, backward: bool) -> Iterator[Unknown]:
        """Yield an `Unknown` for each layer whose weight an opaque operator takes together with data.

        ``backward`` is whether the operator is part of the backward, not recomputed from the forward.
        """
        if not takes_weight_and_data(value, self.forms):
            return
        if backward and (is_elementwise(value) or self._computes_weights(value)):
            return
        file, line = user_place(value.node)
        for layer in {layer for weight in self._weights(value.inputs) for layer in weight}:
            yield Unknown(layer=layer, op=value.op, file=file, line=line)
