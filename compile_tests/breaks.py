"""Graph breaks, with their reasons."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["assert_no_break"]


def _explained(fn: Callable, args: tuple) -> list[str]:
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(fn)(*args)
    reasons = [f"{reason.reason} at {reason.user_stack[-1:]}" for reason in explanation.break_reasons]
    if explanation.graph_count != 1:
        reasons.append(f"{explanation.graph_count} graphs")
    return reasons


def assert_no_break(fn: Callable, *args: object) -> None:
    """Assert that ``fn(*args)`` is one graph; the failure says where it breaks, and why.

    ``fullgraph=True`` raises at the first break, and a frame that Dynamo skips is none at all, which a count of frames
    misses. So the graph count, Dynamo's own explanation and its counters all have to agree.
    """
    reasons = _explained(fn, args)
    reasons += map(str, torch._dynamo.utils.counters["graph_break"].items())
    assert not reasons, "\n".join(["the graph breaks:", *reasons])
