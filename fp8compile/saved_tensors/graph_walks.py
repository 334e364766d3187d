"""Walks over FX graphs, from a node to nodes that share its memory, read it or depend on it.

Graphs may be decomposed by Inductor or not, and may call separately compiled blocks (regions, ``invoke_subgraph``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile.ops.inductor_hints import after, stored
from fp8compile.saved_tensors.operator_tables import COPIES, NONLINEAR, SPLITS, VIEWS, operator_name

__all__ = [
    "NEAR",
    "functions_of",
    "is_copy",
    "is_pointwise",
    "is_region",
    "is_view",
    "name_of",
    "readers_of",
    "same_memory",
    "source_of",
    "tensor_inputs",
    "users_of",
    "value_of",
]

OWN_COPIES = {stored, after}  # ops of ours that return their input's values
NEAR = 256  # nodes to look at around a tensor: more than a feed-forward block has


def name_of(node: fx.Node) -> str:
    """Name of the operator that a node calls, without namespace and overload."""
    return operator_name(node.target)


def value_of(node: Any) -> Any:
    """Fake tensor of a node (``meta["val"]``); None without fake tensor, or if ``node`` is no node."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def is_view(node: fx.Node) -> bool:
    """Whether the result of a node is a view of its first argument."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return source.op == "call_function" and name_of(source) in SPLITS
    return name_of(node) in VIEWS


def is_copy(node: fx.Node) -> bool:
    """Whether the result of a node is a copy of its first argument, possibly cast to another dtype."""
    return name_of(node) in COPIES or node.target in OWN_COPIES


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node computes each element from one element of each input, as views and copies also do."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_view(node) or is_copy(node)


def is_region(node: fx.Node) -> bool:
    """Whether a node is an ``invoke_subgraph``, the call of a separately compiled region."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The floating-point tensors among a node's inputs, except constants; leaves out masks and indices."""
    tensors = [each for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
    return [each for each in tensors if value_of(each).is_floating_point() and not _is_constant(each)]


def _is_constant(node: fx.Node) -> bool:
    return node.op == "call_function" and not any(isinstance(value_of(each), Tensor) for each in node.all_input_nodes)


def _body(call: fx.Node) -> fx.Graph:
    holder: Any = call.args[0]
    owner = call.graph.owning_module
    assert owner is not None, "a graph that calls a region belongs to a module, which has the region's graph"
    body: Any = owner.get_submodule(holder.target)
    graph: fx.Graph = body.graph
    return graph


def same_memory(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from ``node`` back to the node that allocates its memory, through views and regions."""
    found = [node]
    while (node := found[-1]).op == "call_function":
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and is_region(source):
            body = _body(source)
            results: Any = body.output_node().args[0]
            inner = same_memory(results[node.args[1]])
            if inner[-1].op != "placeholder":
                return found + inner
            # the region returns its own argument, which it saves for its backward
            found.append(source.args[2 + body.find_nodes(op="placeholder").index(inner[-1])])
        elif is_view(node):
            found.append(source)
        else:
            break
    return found


def source_of(node: fx.Node) -> fx.Node:
    """Return the node, in the same graph, that allocates the memory of ``node``: an operator or a region's call."""
    return [each for each in same_memory(node) if each.graph is node.graph][-1]


def users_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read ``node``; for a compiled region, its placeholders instead."""
    for user in node.users:
        if user.op == "output":
            continue
        if not is_region(user):
            yield user
            continue
        places = _body(user).find_nodes(op="placeholder")
        yield from (place for place, operand in zip(places, user.args[2:], strict=True) if operand is node)


def readers_of(node: fx.Node, *, through_copies: bool) -> list[fx.Node]:
    """Nodes that read ``node`` or a view of ``node``; if ``through_copies``, also readers of a copy."""
    found, pending, seen = [], [node], {node}
    while pending:
        for user in users_of(pending.pop()):
            if user in seen:
                continue
            seen.add(user)
            if user.op == "placeholder" or is_view(user) or (through_copies and is_copy(user)):
                pending.append(user)
            else:
                found.append(user)
    return found


def functions_of(node: fx.Node, *, past_nonlinear: bool) -> list[fx.Node]:
    """Return the node and the nodes computed elementwise from it alone, or by adding other tensors.

    Nodes behind an operator in `NONLINEAR`, such as exp, are included only if ``past_nonlinear``.
    """
    found, pending = {node: None}, [node]
    while pending and len(found) < NEAR:
        current = pending.pop()
        is_nonlinear = current.op == "call_function" and current is not node and name_of(current) in NONLINEAR
        if is_nonlinear and not past_nonlinear:
            continue
        for user in users_of(current):
            alone = user.op == "placeholder" or (
                is_pointwise(user) and (name_of(user) == "add" or all(each in found for each in tensor_inputs(user)))
            )
            if alone and user not in found:
                found[user] = None
                pending.append(user)
    return list(found)
