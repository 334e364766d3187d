"""fp8compile::snapshot: a copy that keeps its numbers when the tensor that it was made of is overwritten.

`clone` would say the same, but compilers take a clone of an unchanged input for the input itself, also where another
graph changes that: the backward, which updates what the forward read. This op stands in decompositions only; Inductor
lowers it to a copy of its own, and nothing removes it before.
"""

from __future__ import annotations

from typing import Any

from fp8compile.ops.copies import register_copy

__all__ = ["snapshot"]


def _lower(x: Any) -> Any:
    from torch._inductor import lowering

    copy = lowering.clone(x)
    copy.realize()
    return copy


snapshot = register_copy("fp8compile::snapshot", _lower)
