"""Whether Inductor will fuse a tensor: whether the kernel that reads the tensor can also compute it, and how."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch

from fp8compile._compat import nodes_of, statically_true

__all__ = ["VIEWS", "behind_views", "is_fusible", "is_made_by_rows", "is_result_of", "leaves_of"]

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
        if _is_pointwise(node):
            return True
    return False


def _is_pointwise(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in COPIES)


def is_result_of(tensor: torch.Tensor, ops: Collection[torch._ops.OpOverload]) -> bool:
    """Whether a traced tensor is a result of a call of one of these operators, or a view of one."""
    for node in nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS | {operator.getitem}:
            node = node.args[0]
        if node.target in ops:
            return True
    return False


def is_made_by_rows(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor is computed by pointwise code from a number of each row, as a norm's output is.

    The norm's gradient sums along rows, so a kernel that goes by rows reads what the tensor is made of.
    """
    waiting, seen = list(nodes_of(tensor)), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim > 1 and statically_true(value.shape[-1] == 1):
            return True
        if _is_pointwise(node) or node.target in VIEWS:
            waiting += node.all_input_nodes
    return False


# ---------------------------------------------------------------------------------- in a graph that is traced already

BARRIERS = {torch.ops.aten.view.dtype, torch.ops.aten.bitwise_xor.Scalar}  # as `rounding_barrier.made_of_kept` traces


def behind_views(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose values a node shows, through views of it and through a rounding barrier."""
    while node.op == "call_function" and node.target in VIEWS | BARRIERS:
        node = node.args[0]  # type: ignore[assignment]  # the first argument of each of these is a tensor
    return node


def leaves_of(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that a kernel reads which computes this node by pointwise code, without those of fewer elements."""
    size, leaves, seen, left = node.meta["val"].numel(), set(), {node}, [node]
    while left:
        each = left.pop()
        shown = behind_views(each)
        is_pointwise = _is_pointwise(shown)
        value = shown.meta.get("val")
        is_whole = isinstance(value, torch.Tensor) and statically_true(value.numel() == size)
        if not is_pointwise and is_whole:
            leaves.add(shown)
        below = shown.all_input_nodes if is_pointwise else []
        left += [further for further in below if further not in seen]
        seen.update(below)
    return leaves
