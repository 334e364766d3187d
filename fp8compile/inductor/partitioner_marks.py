"""Marks that tell the partitioner where to compute traced values: in the forward, in the backward, or in both."""

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
    """Keep this tensor from the forward for a traced backward, even under checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes_of(tensor):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def make_in_backward(tensor: torch.Tensor) -> None:
    """Compute this tensor in a traced backward, though PyTorch's partitioner might compute it in the forward."""
    for node in nodes_of(tensor):
        node.meta.update(IN_BACKWARD)


@contextmanager
def _marked(marks: dict[str, Any]) -> Iterator[None]:
    """Put marks, which PyTorch's partitioner reads, on everything that is traced inside."""
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
    """Whether the traced code is in a checkpointed region whose policy does not keep its results."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    kept = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return "ac_graph_id" in traceback.current_meta and traceback.current_meta.get("recompute") not in kept


def recomputed(*, in_backward: bool = False) -> AbstractContextManager[None]:
    """Recompute in the backward everything that is traced inside, as checkpointing does.

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
    """Keep in the forward everything that is traced inside; the backward does not read it.

    PyTorch's partitioner treats the wait for a collective as a side effect: it would repeat it in the backward, and
    keep its operand. In a checkpointed region the backward repeats it together with its readers.
    """
    from torch.fx import traceback

    return recomputed() if "ac_graph_id" in traceback.current_meta else _marked(IN_FORWARD)


def left_in_backward() -> AbstractContextManager[None]:
    """Keep in the backward everything that is traced inside, though PyTorch's partitioner might move it forward.

    The partitioner decides by sizes. If sizes differ between ranks, so may its decisions, and a rank would wait in its
    forward for a message that another rank sends in its backward.
    """
    return _marked(IN_BACKWARD)


def current_marks() -> tuple[Any, ...]:
    """The marks in effect; results with different marks are not shared."""
    from torch.fx import traceback

    place = traceback.current_meta.get("partitioner_tag")  # also says that a backward is traced, which is no order
    asked = place if place in (IN_FORWARD["partitioner_tag"], IN_BACKWARD["partitioner_tag"]) else None
    return asked, *(traceback.current_meta.get(key) for key in ("recompute", "ac_graph_id"))
