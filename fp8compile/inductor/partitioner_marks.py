"""Marks in ``node.meta`` that tell the partitioner to compute values in forward, backward or both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fp8compile._compat import IN_BACKWARD, IN_FORWARD, VIEWS, nodes_of, statically_true

__all__ = [
    "is_left_in_backward",
    "is_repeated_in_backward",
    "left_in_backward",
    "left_in_forward",
    "make_in_backward",
    "never_recompute",
    "repeat_in_backward",
    "recomputed",
]


def never_recompute(tensor: torch.Tensor) -> None:
    """Mark this traced tensor's nodes as saved for the backward (MUST_SAVE), even under checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes_of(tensor):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def repeat_in_backward(tensor: torch.Tensor) -> None:
    """Mark for recomputation all clones in a traced tensor's graph that expand a smaller tensor.

    Grouped-query attention, for example, expands heads of k and v. Without the mark (MUST_RECOMPUTE) the partitioner
    would save the clones, because attention's backward is an opaque call.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes_of(tensor):
        if vars(node.graph).setdefault("_fp8compile_repeats_marked", False):
            continue
        vars(node.graph)["_fp8compile_repeats_marked"] = True
        for each in node.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if "recompute" not in each.meta and _repeats(each):
                each.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)


def _repeats(copy: torch.fx.Node) -> bool:
    source: Any = copy.args[0]
    while source.op == "call_function" and source.target in VIEWS:
        source = source.args[0]
    sizes = [each.meta["val"].numel() for each in (copy, source)]
    return statically_true(sizes[0] > sizes[1])


def make_in_backward(tensor: torch.Tensor) -> None:
    """Mark a traced tensor's nodes to stay in the backward; the partitioner could move them to the forward."""
    for node in nodes_of(tensor):
        node.meta.update(IN_BACKWARD)


@contextmanager
def _marked(marks: dict[str, Any]) -> Iterator[None]:
    """Context in which all traced nodes get ``marks`` in ``node.meta``, for PyTorch's partitioner."""
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
    """Whether the code being traced is in a checkpointed region whose results are not saved."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    kept = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return "ac_graph_id" in traceback.current_meta and traceback.current_meta.get("recompute") not in kept


def recomputed(*, in_backward: bool = False) -> AbstractContextManager[None]:
    """Context in which all traced nodes are marked for recomputation in the backward (MUST_RECOMPUTE).

    With ``in_backward``, the nodes run in the backward only. Otherwise PyTorch's partitioner also puts nodes that need
    no gradient into the forward, where it never removes a collective as dead code.
    """
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    marks: dict[str, Any] = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}
    # use the number of the enclosing checkpointed region: PyTorch saves values that go from one region to a later one
    marks["ac_graph_id"] = traceback.current_meta.get("ac_graph_id", 0)
    return _marked({**marks, **(IN_BACKWARD if in_backward else {})})


def left_in_forward() -> AbstractContextManager[None]:
    """Context in which all traced nodes stay in the forward; the backward must not read them.

    Without the mark PyTorch's partitioner repeats the wait for a collective in the backward, and saves the
    collective's operand. In a checkpointed region, the nodes are marked for recomputation instead.
    """
    from torch.fx import traceback

    return recomputed() if "ac_graph_id" in traceback.current_meta else _marked(IN_FORWARD)


def left_in_backward() -> AbstractContextManager[None]:
    """Context in which all traced nodes stay in the backward.

    PyTorch's partitioner might move the nodes into the forward, depending on sizes. A rank would then wait in its
    forward for a message that a rank with other sizes sends in its backward.
    """
    return _marked(IN_BACKWARD)


def is_left_in_backward(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor was made under `left_in_backward`."""
    return any(node.meta.get("partitioner_tag") == IN_BACKWARD["partitioner_tag"] for node in nodes_of(tensor))
