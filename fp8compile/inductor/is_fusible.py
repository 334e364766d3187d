"""Tests of traced tensors: whether Inductor can compute a tensor inside the kernel that reads it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from fp8compile._compat import VIEWS, nodes_of, statically_true

__all__ = ["behind_reshapes", "is_fusible", "is_made_by_rows", "is_pointwise", "is_result_of", "leaves_of"]

COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.prims.convert_element_type.default}


def is_fusible(tensor: torch.Tensor) -> bool:
    """Whether Inductor computes a traced tensor pointwise, and can fuse the computation into kernels that read it.

    False for inputs of the graph, for results of GEMMs and other calls, and in eager mode.
    """
    for node in nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS:
            node = node.args[0]
        if is_pointwise(node):
            return True
    return False


def is_pointwise(node: torch.fx.Node) -> bool:
    """Whether Inductor computes a node pointwise."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (torch.Tag.pointwise in tags or node.target in COPIES)


def is_result_of(tensor: torch.Tensor, ops: Collection[torch._ops.OpOverload]) -> bool:
    """Whether a traced tensor is a result of one of these operators, or a view of the result."""
    for node in nodes_of(tensor):
        while node.op == "call_function" and node.target in VIEWS | {operator.getitem}:
            node = node.args[0]
        if node.target in ops:
            return True
    return False


def is_made_by_rows(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor is computed pointwise from one number for each row, as a norm's output is.

    The kernel of the norm's gradient reads the same inputs row by row, so a reduction along rows can fuse into it.
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
        if is_pointwise(node) or node.target in VIEWS:
            waiting += node.all_input_nodes
    return False


# ---------------------------------------------------------------------------------- in a graph that is traced already

RESHAPES = {
    getattr(torch.ops.aten, name).default
    for name in ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "detach")
}


def behind_reshapes(node: torch.fx.Node) -> torch.fx.Node:
    """Follow reshapes and barriers back from a node; return the node before them, with the same elements.

    A barrier views a tensor's bits as integers, xors them with 0 and views them back.
    """
    while (shown := _before_barrier(node) or _before_view(node, RESHAPES)) is not None:
        node = shown
    return node


def _before_view(node: torch.fx.Node, views: Collection[Any]) -> Any:
    return node.args[0] if node.op == "call_function" and node.target in views else None


def _before_barrier(node: torch.fx.Node) -> Any:
    steps: list[Any] = [node]
    for target in (torch.ops.aten.view.dtype, torch.ops.aten.bitwise_xor.Scalar, torch.ops.aten.view.dtype):
        if steps[-1].op != "call_function" or steps[-1].target is not target:
            return None
        steps.append(steps[-1].args[0])
    _, changed, _, before = steps
    return before if changed.args[1] == 0 and before.meta["val"].dtype == node.meta["val"].dtype else None


def leaves_of(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the nodes that a kernel would read to compute a node pointwise; leaves out smaller, broadcast tensors.

    Empty if the node is not pointwise.
    """
    if not is_pointwise(node):
        return set()
    size, leaves, seen, left = node.meta["val"].numel(), set(), {node}, [node]
    while left:
        each = left.pop()
        while (shown := _before_barrier(each) or _before_view(each, VIEWS)) is not None:
            each = shown
        if is_pointwise(each):
            left += [further for further in each.all_input_nodes if further not in seen]
            seen.update(each.all_input_nodes)
            continue
        value = each.meta.get("val")
        if isinstance(value, torch.Tensor) and statically_true(value.numel() == size):
            leaves.add(each)
    return leaves
