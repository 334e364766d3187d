"""Add entries to Inductor's tables of decompositions, lowerings and passes, as soon as Inductor is imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from fp8compile._compat import when_imported

__all__ = ["register_decomposition", "register_fallback", "register_joint_pass", "register_lowering"]


def register_decomposition(op: torch._ops.OpOverload, fn: Callable[..., Any]) -> None:
    """Let Inductor decompose ``op`` by ``fn``, which takes the same arguments."""

    @functools.wraps(fn)
    def decompose(*args: Any) -> Any:
        return NotImplemented if _seeks_schema() else fn(*args)

    def register() -> None:
        from torch._inductor import decomposition

        decomposition.decompositions.pop(op, None)
        decomposition.register_decomposition([op])(decompose)
        decomposition.fast_random_decomps.cache_clear()  # its cache holds a copy of the table

    when_imported("torch._inductor.decomposition", register)


def _seeks_schema() -> bool:
    """Whether PyTorch traces a compiled region only to learn which inputs the region writes to.

    PyTorch then discards the graph, and decompositions would cost a quarter of the tracing time for nothing.
    """
    from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP

    sought = InvokeSubgraphHOP.gen_schema.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not sought:
        frame = frame.f_back
    return frame is not None


def register_lowering(op: torch._ops.OpOverload, fn: Callable[..., Any]) -> None:
    """Let Inductor lower ``op`` by ``fn``, which takes and returns Inductor's IR."""

    def register() -> None:
        from torch._inductor import lowering

        lowering.register_lowering(op, type_promotion_kind=None)(fn)

    when_imported("torch._inductor.lowering", register)


def register_fallback(op: torch._ops.OpOverload, *, contiguous: bool = False) -> None:
    """Let Inductor call ``op`` itself if no decomposition exists, or if the decomposition returned NotImplemented.

    If ``contiguous``, Inductor passes only contiguous tensors to the op.
    """

    def register() -> None:
        from torch._inductor import lowering

        layout = lowering.require_contiguous if contiguous else None
        lowering.make_fallback(op, layout, warn=False, override_decomp=True)

    when_imported("torch._inductor.lowering", register)


def register_joint_pass(ops: Sequence[torch._ops.OpOverload], run: Callable[[torch.fx.Graph], None]) -> None:
    """Call ``run`` on each joint graph that calls one of ``ops``, before the partitioner cuts the graph.

    Graphs without a backward are included. ``run`` changes the graph in place and removes all calls of ``ops``. New
    nodes may stand anywhere, because Inductor sorts the graph afterwards.
    """

    def register() -> None:
        from torch._inductor import pattern_matcher
        from torch._inductor.fx_passes import joint_graph

        def handle(match: Any, *args: Any) -> None:
            run(match.graph)

        for op in ops:
            pattern = pattern_matcher.CallFunctionVarArgs(op, users=pattern_matcher.MULTIPLE)
            pattern_matcher.register_graph_pattern(pattern, pass_dict=joint_graph.pass_patterns[-1])(handle)

    when_imported("torch._inductor.fx_passes.joint_graph", register)
