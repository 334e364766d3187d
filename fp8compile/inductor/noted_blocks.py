"""Block of a layer's quantizer, stored in ``node.meta["custom"]`` of cast nodes.

Decomposed graphs have no quantizers. Code that saves a tensor as codes takes the block of other casts of the tensor.
Inductor then packs the tensor in the kernel that computes the amaxes of these casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["block_noted", "noted_block"]

KEY = "fp8compile_block"


@contextmanager
def block_noted(block: tuple[int, int] | None) -> Iterator[None]:
    """Note the block, if there is one, on all nodes that are traced in this context."""
    if block is None:
        yield
        return
    from torch.fx import traceback

    meta: dict[str, Any] = traceback.current_meta
    before = meta.get("custom")
    meta["custom"] = {**(before or {}), KEY: block}
    try:
        yield
    finally:
        meta.pop("custom")
        if before is not None:
            meta["custom"] = before


def noted_block(node: Any) -> tuple[int, int] | None:
    """The block that `block_noted` stored in ``node.meta["custom"]``, or None."""
    return node.meta.get("custom", {}).get(KEY)
