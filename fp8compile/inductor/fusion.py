"""Whether Inductor will fuse a tensor: whether the kernel that reads the tensor can also compute it."""

from __future__ import annotations

import torch

from fp8compile._compat import nodes_of

__all__ = ["VIEWS", "is_fusible"]

VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "alias",
        "detach",
    )
} | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor}
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.prims.convert_element_type.default}


def is_fusible(tensor: torch.Tensor) -> bool:
    """Whether Inductor computes a traced tensor by pointwise code, which it fuses with the tensor's readers.

    False for inputs of the graph, for results of products and other calls, and in eager mode.
    """
    for node in nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS:
            node = node.args[0]
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in COPIES):
            return True
    return False
