"""fp8compile::realize: a value that Inductor computes once and stores, instead of once for each use.

Inductor inlines pointwise code into whatever reads it. For the multiplier of a block that means an exact (float64)
division for every element. This op stands in decompositions only; its lowering marks the value as one to store.
"""

from __future__ import annotations

from typing import Any

from fp8compile.ops.copies import register_copy

__all__ = ["realize"]


def _lower(x: Any) -> Any:
    x.realize()
    return x


realize = register_copy("fp8compile::realize", _lower)
