"""Record a layer's block size on cast nodes, in ``node.meta["custom"]``.

Decomposed graphs have no quantizers. To save a tensor as codes with the same block, `fp8compile.saved_tensors`
reads the block from the nearest cast. Inductor then packs these codes in the kernel that computes the amaxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["annotate_block", "annotated_block"]

KEY = "fp8compile_block"


@contextmanager
def annotate_block(block: tuple[int, int] | None) -> Iterator[None]:
    """Context that records the block, if there is one, on all nodes that are traced in it."""
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


def annotated_block(node: Any) -> tuple[int, int] | None:
    """Return the block that `annotate_block` recorded on a node, or None."""
    return node.meta.get("custom", {}).get(KEY)
