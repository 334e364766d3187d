"""Marks on traced values, which say where the partitioner computes them: in the forward, in the backward, or anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fp8compile._compat import nodes_of

__all__ = [
    "is_repeated_in_backward",
    "left_in_backward",
    "left_in_forward",
    "make_in_backward",
    "current_marks",
    "never_recompute",
    "recomputed",
]

IN_FORWARD = {"partitioner_tag": "must_be_in_forward"}
IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}


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


def left_in_backward() -> AbstractContextManager[None]:
    """What is traced inside stays in the backward, where PyTorch's partitioner could have it in the forward as well.

    It decides by sizes. Where those of ranks differ, so may what it decides, and a rank would wait in its forward for
    a message that another one sends in its backward.
    """
    return _marked(IN_BACKWARD)


def current_marks() -> tuple:
    """What the partitioner is told of what is being traced: results that it treats unlike are not shared."""
    from torch.fx import traceback

    place = traceback.current_meta.get("partitioner_tag")  # also says that a backward is traced, which is no order
    asked = place if place in (IN_FORWARD["partitioner_tag"], IN_BACKWARD["partitioner_tag"]) else None
    return asked, *(traceback.current_meta.get(key) for key in ("recompute", "ac_graph_id"))
