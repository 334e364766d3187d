"""Deduplication of calls: while a graph is traced, calls with equal arguments share one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from typing import Any

import torch

from fp8compile._compat.autograd import runs_in_backward
from fp8compile._compat.tracing import graph_tracer, nodes_of

__all__ = ["IN_BACKWARD", "IN_FORWARD", "VIEWS", "constant", "current_marks", "once_a_graph"]

# marks in ``node.meta`` that PyTorch's partitioner reads
IN_FORWARD = {"partitioner_tag": "must_be_in_forward"}
IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}
VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "alias",
        "detach",
    )
} | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor}
RESULTS = "_fp8compile_results"  # attribute of a graph that is being traced
ALIASES = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
# Padding counts as a part too: ranks whose parts begin inside a block pad, other ranks do not, and all of them must
# send the same messages.
PARTS = VIEWS | {torch.ops.aten.select.int, torch.ops.aten.constant_pad_nd.default, torch.ops.aten.clone.default}


def once_a_graph(fn: Callable[..., Any], *, by_marks: bool = True) -> Callable[..., Any]:
    """Wrap a function so that equal calls in one traced graph become a single call.

    Without this, the backward of a graph's last layer would compute the weight's amaxes again: from PyTorch 2.15 on,
    the partitioner does not merge a node that only the forward needs with an equal node of the backward.

    Args:
        fn: The function. Its first argument is a tensor, others are tensors or hashable values. Nothing may write to
            its results.
        by_marks: Whether calls under different partitioner marks (`current_marks`) stay different calls. If False, the
            backward reads the forward's result, which has the forward's marks.
    """

    @wraps(fn)
    def once(*args: Any) -> Any:
        place = _place(args, by_marks=by_marks)
        return fn(*args) if place is None else _remembered(place[0], (fn, *place[1]), lambda: fn(*args))

    return once


def _place(args: tuple[Any, ...], *, by_marks: bool) -> tuple[torch.fx.Graph, tuple[Any, ...]] | None:
    """Return the graph that is being traced and a hashable key for ``args``; None if calls can't be shared."""
    # Dynamo can't trace graph_tracer(), and while it traces there are no graph nodes to share yet
    if torch.compiler.is_dynamo_compiling() or graph_tracer() is None:
        return None
    found = [_nodes_below(arg) if isinstance(arg, torch.Tensor) else [arg] for arg in args]
    if any(len(each) != 1 for each in found):
        return None  # a tensor has no node in a graph, or nodes in several graphs
    values = [value for (value,) in found]
    graph = next(value.graph for value in values if isinstance(value, torch.fx.Node))
    # the type is part of the key, because a functional tensor and the tensor that it wraps have the same node
    return graph, (_meaning(values), current_marks() if by_marks else None, type(args[0]))


def constant(number: float, dtype: torch.dtype, like: torch.Tensor, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a tensor filled with ``number``, on the device of ``like``; equal calls in a traced graph share it.

    Tracing each creation of a tensor costs a millisecond. Nothing may write to the result.
    """
    if torch.compiler.is_dynamo_compiling() or graph_tracer() is None or len(found := _nodes_below(like)) != 1:
        return torch.full(shape, number, dtype=dtype, device=like.device)
    key = (constant, repr(number), dtype, like.device, shape, current_marks(), type(like))
    make = partial(torch.full, shape, number, dtype=dtype, device=like.device)
    return _remembered(found[0].graph, key, make)


def _remembered(graph: torch.fx.Graph, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    results = vars(graph).setdefault(RESULTS, {})
    if key not in results:
        results[key] = make()
    return results[key]


def _nodes_below(tensor: torch.Tensor) -> list[Any]:
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return nodes_of(tensor)


def _meaning(value: Any) -> Any:
    """Return a hashable key for a call's argument; equal keys stand for equal values.

    The key of a view, part or padded copy is made of the operation and the key of the source.
    """
    while isinstance(value, torch.fx.Node) and value.op == "call_function" and value.target in ALIASES:
        value = value.args[0]
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


def current_marks() -> tuple[Any, ...]:
    """Return a key of the marks that nodes traced now get, so that calls under different marks are not merged."""
    from torch.fx import traceback

    place = traceback.current_meta.get("partitioner_tag")  # other tags only say that a backward is being traced
    asked = place if place in (IN_FORWARD["partitioner_tag"], IN_BACKWARD["partitioner_tag"]) else None
    # PyTorch tags the forward's nodes anew before it traces the backward: what was left for the backward no longer is
    is_void = asked == IN_BACKWARD["partitioner_tag"] and not runs_in_backward()
    return asked, is_void, *(traceback.current_meta.get(key) for key in ("recompute", "ac_graph_id"))
