"""Marks on traced values, which say where the partitioner computes them: in the forward, in the backward, or anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from functools import wraps
from typing import Any

import torch

from fp8compile._compat.tracing import nodes_of

__all__ = [
    "constant",
    "is_fusible",
    "is_repeated_in_backward",
    "left_in_backward",
    "left_in_forward",
    "make_in_backward",
    "never_recompute",
    "once_a_graph",
    "recomputed",
]

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


COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.prims.convert_element_type.default}


def never_recompute(tensor: torch.Tensor) -> None:
    """Let a traced backward have this tensor as the forward made it, checkpointed or not."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes_of(tensor):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def make_in_backward(tensor: torch.Tensor) -> None:
    """Let a traced backward make this tensor, where PyTorch's partitioner could have the forward make and keep it."""
    for node in nodes_of(tensor):
        node.meta.update(IN_BACKWARD)


@contextmanager
def _marked(marks: dict[str, Any]) -> Iterator[None]:
    """What is traced inside carries these marks, which PyTorch's partitioner reads."""
    from torch.fx import traceback

    meta = traceback.current_meta
    before = {key: meta[key] for key in marks if key in meta}
    meta.update(marks)
    try:
        yield
    finally:
        for key in marks:
            meta.pop(key, None)
        meta.update(before)


def is_repeated_in_backward() -> bool:
    """Whether what is being traced is in a checkpointed region, and no policy of it keeps its results."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    kept = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return "ac_graph_id" in traceback.current_meta and traceback.current_meta.get("recompute") not in kept


def recomputed(*, in_backward: bool = False) -> AbstractContextManager[None]:
    """What is traced inside is never kept for the backward, which makes it once more, as with checkpointing.

    Args:
        in_backward: It belongs to the backward alone. PyTorch's partitioner would put it in the forward too where it
            needs no gradient, and as a collective is no dead code, it would be sent there for nothing.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    marks = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}
    # inside of a checkpointed region its own number: PyTorch keeps what leads from one region into a later one
    marks["ac_graph_id"] = traceback.current_meta.get("ac_graph_id", 0)
    return _marked({**marks, **(IN_BACKWARD if in_backward else {})})


def left_in_forward() -> AbstractContextManager[None]:
    """What is traced inside stays in the forward, for nothing in the backward reads it.

    PyTorch's partitioner holds the wait for a collective for a side effect, and would have the backward repeat it and
    keep its operand. In a checkpointed region the backward repeats it together with what reads it.
    """
    from torch.fx import traceback

    return recomputed() if "ac_graph_id" in traceback.current_meta else _marked(IN_FORWARD)


IN_FORWARD = {"partitioner_tag": "must_be_in_forward"}


IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}


def left_in_backward() -> AbstractContextManager[None]:
    """What is traced inside stays in the backward, where PyTorch's partitioner could have it in the forward as well.

    It decides by sizes. Where those of ranks differ, so may what it decides, and a rank would wait in its forward for
    a message that another one sends in its backward.
    """
    return _marked(IN_BACKWARD)


def once_a_graph(fn: Callable) -> Callable:
    """A function whose equal calls in a graph that is being traced are one call.

    PyTorch's partitioner merges equal nodes, and from 2.15 on not a node that only the forward needs with one of the
    backward: the backward of a graph's last layer would compute the amaxes of its weight again.

    Args:
        fn: Takes tensors, the first argument among them, and values with a hash. Nobody writes to its results.
    """

    @wraps(fn)
    def once(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args)  # to Dynamo, which can't trace the question, nothing stands in a graph yet
        found = [_nodes_below(arg) if isinstance(arg, torch.Tensor) else [arg] for arg in args]
        if any(len(each) != 1 for each in found):
            return fn(*args)  # nothing is being traced, or one tensor stands in several graphs
        values = [value for (value,) in found]
        graph = next(value.graph for value in values if isinstance(value, torch.fx.Node))
        # the type, since a functional tensor and the one below it have the same node
        key = (fn, _meaning(values), _marks(), type(args[0]))
        return _remembered(graph, key, lambda: fn(*args))

    return once


def constant(number: float, dtype: torch.dtype, like: torch.Tensor, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """A number as a tensor, one for all of a graph that is being traced: made anew, each is a millisecond of tracing.

    Args:
        number: What all elements are.
        dtype: Of the tensor.
        like: A tensor on whose device it is, and in whose graph.
        shape: Of the tensor. Nobody writes to it.
    """

    def make() -> torch.Tensor:
        return torch.full(shape, number, dtype=dtype, device=like.device)

    if torch.compiler.is_dynamo_compiling() or len(found := _nodes_below(like)) != 1:
        return make()
    key = (constant, number, dtype, like.device, shape, _marks(), type(like))
    return _remembered(found[0].graph, key, make)


def _remembered(graph: torch.fx.Graph, key: tuple, make: Callable[[], Any]) -> Any:
    """What ``make`` has returned for this key while this graph was traced."""
    results = vars(graph).setdefault(RESULTS, {})
    if key not in results:
        results[key] = make()
    return results[key]


def _nodes_below(tensor: torch.Tensor) -> list[Any]:
    """The nodes of a tensor, or of the value that a functional one has at the moment."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return nodes_of(tensor)


def _marks() -> tuple:
    """What the partitioner is told of what is being traced: results that it treats unlike are not shared."""
    from torch.fx import traceback

    place = traceback.current_meta.get("partitioner_tag")  # also says that a backward is traced, which is no order
    asked = place if place in (IN_FORWARD["partitioner_tag"], IN_BACKWARD["partitioner_tag"]) else None
    return asked, *(traceback.current_meta.get(key) for key in ("recompute", "ac_graph_id"))


RESULTS = "_fp8compile_results"  # on a graph that is being traced
# Padding too: of ranks whose parts begin elsewhere in a block some pad and others do not, and all have to send alike.
PARTS = VIEWS | {torch.ops.aten.select.int, torch.ops.aten.constant_pad_nd.default, torch.ops.aten.clone.default}


def _meaning(value: Any) -> Any:
    """A node, or what it does to another one if it is a view, a part or a padded copy of it: equal for equal ones."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_meaning, value))
    if isinstance(value, torch.SymInt):
        return value.node.expr  # has no hash itself
    if is_dataclass(value) and any(_has_symbol(each) for each in vars(value).values()):
        return type(value), *map(_meaning, vars(value).values())
    if isinstance(value, torch.fx.Node) and value.op == "call_function" and value.target in PARTS:
        return value.target, *map(_meaning, value.args), *value.kwargs.items()
    return value


def _has_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (isinstance(value, tuple) and any(map(_has_symbol, value)))


def is_fusible(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is being traced comes out of code that Inductor fuses with what reads it.

    Inputs of the graph do not, and neither do results of products and other calls, nor anything in eager mode.
    """
    for node in nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS:
            node = node.args[0]
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in COPIES):
            return True
    return False
