"""Calls that a graph makes once: while the graph is traced, equal calls share one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any

import torch

from fp8compile._compat import graph_tracer, nodes_of
from fp8compile.inductor.fusion import VIEWS
from fp8compile.inductor.partitioner_marks import current_marks

__all__ = ["constant", "once_a_graph"]

RESULTS = "_fp8compile_results"  # attribute of a graph that is being traced
# Padding counts as a part too: ranks whose parts begin inside a block pad, other ranks do not, and all of them must
# send the same messages.
PARTS = VIEWS | {torch.ops.aten.select.int, torch.ops.aten.constant_pad_nd.default, torch.ops.aten.clone.default}


def once_a_graph(fn: Callable[..., Any], *, by_marks: bool = True) -> Callable[..., Any]:
    """Wrap a function so that equal calls in one traced graph become a single call.

    PyTorch's partitioner merges equal nodes. But from 2.15 on it does not merge a node that only the forward needs
    with an equal node of the backward: the backward of a graph's last layer would compute its weight's amaxes again.

    Args:
        fn: The function. Its first argument is a tensor, others are tensors or hashable values. Nothing may write to
            its results.
        by_marks: Whether calls with different marks for the partitioner are different calls. If not, a call of the
            backward takes the result that the forward has made, marked as the forward marked it.
    """

    @wraps(fn)
    def once(*args: Any) -> Any:
        # Dynamo can't trace graph_tracer(), and while it traces there are no graph nodes to share yet
        if torch.compiler.is_dynamo_compiling() or graph_tracer() is None:
            return fn(*args)
        found = [_nodes_below(arg) if isinstance(arg, torch.Tensor) else [arg] for arg in args]
        if any(len(each) != 1 for each in found):
            return fn(*args)  # a tensor has no node in a graph, or nodes in several graphs
        values = [value for (value,) in found]
        graph = next(value.graph for value in values if isinstance(value, torch.fx.Node))
        # the type is part of the key, because a functional tensor and the tensor that it wraps have the same node
        key = (fn, _meaning(values), current_marks() if by_marks else None, type(args[0]))
        return _remembered(graph, key, lambda: fn(*args))

    return once


def constant(number: float, dtype: torch.dtype, like: torch.Tensor, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """A tensor on the device of ``like``, filled with a number and shared in the traced graph that ``like`` is in.

    Equal calls share one tensor, because each costs a millisecond of tracing. Nothing may write to it.
    """
    if torch.compiler.is_dynamo_compiling() or graph_tracer() is None or len(found := _nodes_below(like)) != 1:
        return torch.full(shape, number, dtype=dtype, device=like.device)
    key = (constant, number, dtype, like.device, shape, current_marks(), type(like))
    make = partial(torch.full, shape, number, dtype=dtype, device=like.device)
    return _remembered(found[0].graph, key, make)


def _remembered(graph: torch.fx.Graph, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """The result of ``make`` for a key, stored on the graph while the graph is traced."""
    results = vars(graph).setdefault(RESULTS, {})
    if key not in results:
        results[key] = make()
    return results[key]


def _nodes_below(tensor: torch.Tensor) -> list[Any]:
    """The graph nodes of a tensor; a functional tensor is first unwrapped to its current value."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return nodes_of(tensor)


def _meaning(value: Any) -> Any:
    """A key for an argument of a call, equal for arguments that stand for the same value.

    A node is its own key. For a view, part or padded copy, the key is the operation and the key of its source.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_meaning, value))
    if isinstance(value, torch.SymInt):
        return value.node.expr  # a SymInt itself has no hash
    if is_dataclass(value) and any(_has_symbol(each) for each in vars(value).values()):
        return type(value), *map(_meaning, vars(value).values())
    if isinstance(value, torch.fx.Node) and value.op == "call_function" and value.target in PARTS:
        return value.target, *map(_meaning, value.args), *value.kwargs.items()
    return value


def _has_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (isinstance(value, tuple) and any(map(_has_symbol, value)))
