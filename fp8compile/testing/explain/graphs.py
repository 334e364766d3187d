"""The matrix products in a model's graphs, each with the layer that it belongs to.

    model, inputs --Dynamo, AOTAutograd--> forward and backward graphs
        |                                        |  each product: its operands, where its result goes
        +-- parameters by identity --------------+--> GraphGemm: layer, which of the three GEMMs, operands' dtypes

A product is a layer's because it reads the layer's weight, or because its result leaves the graph as that weight's
gradient. Only where neither is so (a weight that is computed, or shared) the module that was being called decides.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8compile.quantizers import GEMMS, Gemm, Recipe, gemm_kind
from fp8compile.testing.recording import KeptGraph, Recording

__all__ = ["GraphGemm", "describe", "graph_gemms", "layer_of_stack", "record"]

LAYER_OPS = dict(zip(("fp8compile::linear", "fp8compile::grad_input", "fp8compile::grad_weight"), GEMMS, strict=True))
# of other products, where the operands stand among the arguments
PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1), "aten::_scaled_mm_v2": (0, 1), "fp8compile::scaled_mm": (0, 1),
}  # fmt: skip
TURNS = frozenset({"aten::t", "aten::transpose", "aten::permute"})
# what leaves a tensor the same numbers, up to rounding: looked through on the way to a parameter
SAME_VALUES = TURNS | frozenset({
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias",
    "aten::detach", "aten::_to_copy", "aten::clone", "aten::expand", "aten::squeeze", "aten::unsqueeze",
})  # fmt: skip
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
STEP = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)")


@dataclass(frozen=True, kw_only=True)
class GraphGemm:
    """One product in a graph.

    Attributes:
        layer: Name of the layer, None where it is no layer's.
        gemm: "output", "grad_input" or "grad_weight".
        op: The operator.
        runs: Operands' formats and scales as `describe` says them, or their dtype.
        is_fp8: Whether both operands are FP8.
        m: Rows of the result.
        k: What is summed over.
        n: Columns of the result.
        in_bytes: Of an element of each operand before it is quantized.
        out_bytes: Of an element of the result.
        casts: One key for each operand that is quantized: equal keys are one cast.
        parameters: For each of ``casts``, whether it is of a parameter.
    """

    layer: str | None
    gemm: str
    op: str
    runs: str
    is_fp8: bool
    m: int
    k: int
    n: int
    in_bytes: int
    out_bytes: int
    casts: tuple[tuple[Any, ...], ...] = ()
    parameters: tuple[bool, ...] = ()


def describe(recipe: Recipe, gemm: Gemm) -> str | None:
    """Formats and scales of a GEMM's operands, such as "e4m3 x e4m3 rowwise"; None for high precision."""
    quantizers = recipe.quantizers(gemm)
    if quantizers is None:
        return None
    a, b = quantizers
    blocks = [
        quantizer.transposed().block if turned else quantizer.block
        for quantizer, turned in ((a, gemm.a_transposed), (b, gemm.b_transposed))
    ]
    return f"{a.format} x {b.format} {gemm_kind(*blocks)}"


def _name(target: Any) -> str:
    return target.name().partition(".")[0] if isinstance(target, torch._ops.OpOverload) else str(target)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


# ---------------------------------------------------------------------------------- running


class _Watching(Recording):
    """Keeps, beside the graphs, the tensors that each was first called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, Sequence[Any]] = {}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        run = super().__call__(graph, inputs)
        number = len(self.graphs) - 1

        def call(*given: Any) -> Any:
            self.inputs.setdefault(number, given)
            return run(*given)

        return call


@dataclass(frozen=True)
class Recorded:
    """A graph and the tensors that went into it."""

    kept: KeptGraph
    inputs: Sequence[Any]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Recorded]:
    """Compile and run a model, forward and backward; no gradient is left behind.

    Returns:
        Its graphs, one if nothing breaks them.
    """
    from torch.utils import _pytree as pytree

    watching = _Watching()
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(suppress_errors=False):
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # of breaks, which the graph report has
        outputs = torch.compile(model, backend=watching, dynamic=False)(*args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    leaves = [t for t in (*model.parameters(), *given) if t.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    torch._dynamo.reset()
    return [Recorded(kept, watching.inputs.get(number, ())) for number, kept in enumerate(watching.graphs)]


# ---------------------------------------------------------------------------------- whose product it is


def _path(text: str) -> str:
    """``layers.0.gate`` of ``L['self']._modules['layers'][0].gate``: without what the outermost object was called."""
    rest = re.sub(r"^L\['\w+'\]", "", text)
    return ".".join(next(filter(None, match)) for match in STEP.findall(rest))


def layer_of_stack(node: fx.Node, layers: Sequence[str]) -> str | None:
    """The innermost of these layers that was being called when a node was traced; None if none was.

    A name may have a function's variable before it. And after a graph break the frames of inner modules are traced on
    their own, so it may lack its beginning; where two layers end alike, none is named.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        path = _path(path)
        if path in layers:
            return path
        inside = [layer for layer in layers if layer and path.endswith(f".{layer}")]
        if inside:
            return max(inside, key=len)
        ending = [layer for layer in layers if path and layer.endswith(f".{path}")]
        if len(ending) == 1:
            return ending[0]
    return None


class _Owners:
    """Which layers' weights the inputs of a graph are, and what flows from and to them."""

    def __init__(self, recorded: Recorded, weights: dict[int, list[str]]) -> None:
        self.forward = recorded.kept.forward
        self.nodes = {node.name: node for node in self.forward.graph.nodes}
        self.weights = [weights.get(id(tensor), []) for tensor in recorded.inputs]
        self.parameters = [isinstance(tensor, nn.Parameter) for tensor in recorded.inputs]

    def _input_index(self, node: fx.Node) -> int | None:
        return getattr(node.meta.get("desc"), "idx", None) if node.op == "placeholder" else None

    def source(self, node: fx.Node) -> fx.Node:
        """The node whose values these are, in the forward graph where the backward got them from there."""
        while True:
            saved = self.nodes.get(node.name)
            if node.op == "placeholder" and saved is not None and saved is not node:
                node = saved
            elif node.op == "call_function" and _name(node.target) in SAME_VALUES:
                node = node.all_input_nodes[0]
            else:
                return node

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node has a parameter's values."""
        index = self._input_index(self.source(node))
        return index is not None and index < len(self.parameters) and self.parameters[index]

    def reading(self, node: fx.Node) -> list[str]:
        """Layers whose weight an operand is."""
        index = self._input_index(self.source(node))
        return self.weights[index] if index is not None and index < len(self.weights) else []

    def gradient_of(self, node: fx.Node) -> list[str]:
        """Layers as whose weight's gradient a result leaves the graph, alone or as a summand."""
        for user in node.users:
            if user.op == "output":
                outputs, described = user.args[0], user.meta.get("desc") or ()
                for output, described_as in zip(outputs, described, strict=False):
                    index = getattr(getattr(described_as, "grad_of", None), "idx", None)
                    if output is node and index is not None and index < len(self.weights):
                        return self.weights[index]
            elif _name(user.target) in {*SAME_VALUES, "aten::add"} and (found := self.gradient_of(user)):
                return found
        return []


def _one_of(candidates: list[str], node: fx.Node) -> str:
    named = layer_of_stack(node, candidates) if len(candidates) > 1 else None
    return candidates[0] if named is None else named


def _whose(
    node: fx.Node, operands: Sequence[fx.Node], owners: _Owners, layers: list[str], *, backward: bool
) -> tuple[str | None, str]:
    """Layer and GEMM of a product."""
    # in a backward graph, what has no mark of the backward is computed again for it
    if not backward or (node.meta.get("nn_module_stack") and not node.meta.get("fwd_nn_module_stack")):
        gemm = OUTPUT.name
    elif gradient := owners.gradient_of(node):
        return _one_of(gradient, node), GRAD_WEIGHT.name
    else:
        gemm = GRAD_INPUT.name
    for operand in operands:
        if candidates := owners.reading(operand):
            return _one_of(candidates, node), gemm
    layer = layer_of_stack(node, layers)
    # grad_output^T @ x, of a weight that no parameter tells
    left = operands[0]
    if gemm == GRAD_INPUT.name and left.op == "call_function" and _name(left.target) in TURNS:
        gemm = GRAD_WEIGHT.name
    return layer, gemm


# ---------------------------------------------------------------------------------- what it multiplies


def _sizes(gemm: str, operands: Sequence[Tensor]) -> tuple[int, int, int]:
    """(m, k, n) of a layer op's product, from the tensors as the layer holds them."""
    a, b = operands
    if gemm == OUTPUT.name:
        return prod(a.shape[:-1]), b.shape[1], b.shape[0]
    if gemm == GRAD_INPUT.name:
        return prod(a.shape[:-1]), b.shape[0], b.shape[1]
    return a.shape[-1], prod(a.shape[:-1]), b.shape[-1]


def _layer_gemm(node: fx.Node, owners: _Owners, layer: str | None) -> GraphGemm:
    gemm = LAYER_OPS[_name(node.target)]
    *tensors, recipe = fx.map_arg(node.args, _value)
    a, b = tensors[:2]
    runs, quantizers = describe(recipe, gemm), recipe.quantizers(gemm)
    m, k, n = _sizes(gemm.name, (a, b))
    casts, parameters = (), ()
    if quantizers is not None:
        sources = [owners.source(operand) for operand in node.args[:2]]
        casts = tuple(
            (source.name, quantizer, tensor.numel())
            for source, quantizer, tensor in zip(sources, quantizers, (a, b), strict=True)
        )
        parameters = tuple(owners.is_parameter(operand) for operand in node.args[:2])
    return GraphGemm(
        layer=layer,
        gemm=gemm.name,
        op=_name(node.target),
        runs=runs or str(a.dtype).removeprefix("torch."),
        is_fp8=runs is not None,
        m=m,
        k=k,
        n=n,
        in_bytes=a.element_size(),
        out_bytes=_value(node).element_size(),
        casts=casts,
        parameters=parameters,
    )


def _other_gemm(node: fx.Node, operands: Sequence[fx.Node], layer: str | None, gemm: str) -> GraphGemm:
    a, b = map(_value, operands)
    op = _name(node.target)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (a, b)]
    is_fp8 = op == "fp8compile::scaled_mm" or ("scaled" in op and all("float8" in dtype for dtype in dtypes))
    runs = dtypes[0] if dtypes[0] == dtypes[1] else " x ".join(dtypes)
    return GraphGemm(
        layer=layer,
        gemm=gemm,
        op=op,
        runs=f"{runs} by {op}" if is_fp8 else runs,
        is_fp8=is_fp8,
        m=prod(a.shape[:-1]),
        k=a.shape[-1],
        n=b.shape[-1],
        in_bytes=a.element_size(),
        out_bytes=_value(node).element_size(),
    )


def _gemms(recorded: Recorded, weights: dict[int, list[str]], layers: list[str]) -> Iterator[GraphGemm]:
    owners = _Owners(recorded, weights)
    for backward, graph in ((False, recorded.kept.forward), (True, recorded.kept.backward)):
        if graph is None:
            continue
        inner = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
        for node in (node for module in inner for node in module.graph.nodes if node.op == "call_function"):
            op = _name(node.target)
            if op in LAYER_OPS:
                layer, _ = _whose(node, node.args[1:2], owners, layers, backward=backward)
                yield _layer_gemm(node, owners, layer)
            elif op in PRODUCTS:
                operands = [node.args[index] for index in PRODUCTS[op]]
                layer, gemm = _whose(node, operands, owners, layers, backward=backward)
                yield _other_gemm(node, operands, layer, gemm)


def graph_gemms(recorded: Sequence[Recorded], weights: dict[int, list[str]], layers: list[str]) -> list[GraphGemm]:
    """All products of all graphs.

    Args:
        recorded: Of `record`.
        weights: By identity of a parameter, the layers whose weight it is.
        layers: Names of all layers.

    Returns:
        In the order of the graphs; the layer of one that is no layer's, such as attention's, is None.
    """
    return [gemm for each in recorded if each.kept.forward for gemm in _gemms(each, weights, layers)]
