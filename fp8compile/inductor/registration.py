"""Add entries to Inductor's tables of decompositions, lowerings and passes, as soon as Inductor is imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from fp8compile._compat import when_imported

__all__ = ["register_decomposition", "register_fallback", "register_lowering"]


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


def register_fallback(op: torch._ops.OpOverload, *, contiguous: int = 0) -> None:
    """Let Inductor call ``op`` itself if no decomposition exists, or if the decomposition returned NotImplemented.

    Inductor writes the first ``contiguous`` arguments of the op in contiguous memory; -1 for all of them.
    """

    def register() -> None:
        from torch._inductor import lowering

        def laid_out(node: Any, *args: Any, **kwargs: Any) -> Any:
            last = contiguous if contiguous >= 0 else len(args)
            first, _ = lowering.require_contiguous(node, *args[:last])
            return (*first, *args[last:]), kwargs

        lowering.make_fallback(op, laid_out if contiguous else None, warn=False, override_decomp=True)

    when_imported("torch._inductor.lowering", register)
