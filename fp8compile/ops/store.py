"""fp8compile::store: codes that Inductor lays down once, as they are, for all GEMMs that read them.

Layers that share an input, such as q, k and v, share its codes. But Inductor copies what a product reads through a
view, unless that already is a buffer with strides that no longer change: it would write the same codes once for each
layer.
"""

from __future__ import annotations

from typing import Any

from fp8compile.ops.copies import register_copy

__all__ = ["store"]


def _lower(x: Any) -> Any:
    from torch._inductor import ir, lowering

    if isinstance(x.data, ir.BaseView) and not isinstance(x.data, ir.ReinterpretView):
        x = lowering.clone(x)  # codes that end in a view of their bits have no layout of their own to freeze
    x.realize()
    x.freeze_layout()
    return x


store = register_copy("fp8compile::store", _lower)
