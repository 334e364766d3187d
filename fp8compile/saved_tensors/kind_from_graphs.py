"""Find what kind of tensor is saved (norm, activation, ...) from the graphs that make it and read it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile._compat import is_unbacked, module_path, statically_true
from fp8compile.inductor import annotated_block
from fp8compile.ops.inductor_hints import ONCE, stored
from fp8compile.saved_tensors.graph_walks import (
    NEAR,
    functions_of,
    is_copy,
    is_pointwise,
    is_region,
    is_view,
    name_of,
    readers_of,
    same_memory,
    tensor_inputs,
    users_of,
    value_of,
)
from fp8compile.saved_tensors.operator_tables import (
    NONLINEAR,
    NORMS,
    READS_ONCE,
    REDUCTIONS,
    SOFTMAX,
    SPLITS,
    SUMS,
    kind_of_call,
)
from fp8compile.saved_tensors.saved_tensor import SavedTensor

__all__ = ["block_beside", "described"]


def described(node: fx.Node, place: fx.Node) -> SavedTensor | None:
    """Describe a saved tensor; None if it can't become codes, such as a statistic or an argument of the forward.

    Args:
        node: Node of the forward graph that makes the tensor.
        place: Placeholder of the backward graph that receives the tensor.
    """
    value = value_of(node)
    if not isinstance(value, Tensor) or value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    nodes = same_memory(node)
    source = nodes[-1]
    if source.op != "call_function" or _is_statistic(source):
        return None
    return SavedTensor(
        kind=_kind(nodes, place),
        shape=tuple(_hint(size) for size in value.shape),
        dtype=value.dtype,
        module=_module(source),
        made_by=name_of(source),
    )


def block_beside(node: fx.Node, place: fx.Node) -> tuple[int, int] | None:
    """Search the graphs for the nearest FP8 cast of a saved tensor or of values computed from it.

    Return the cast's block, (rows, columns); None if there is no cast near. ``node`` makes the tensor in the forward;
    ``place`` receives it in the backward.
    """
    starts = (*same_memory(node), place)
    return next((block for start in starts if (block := _nearest_block(start)) is not None), None)


def _nearest_block(start: fx.Node) -> tuple[int, int] | None:
    pending, seen = [start], {start}
    for current in pending:  # the list grows: nearer nodes come first
        for user in users_of(current):
            if user in seen or len(seen) > NEAR:
                continue
            seen.add(user)
            if (block := annotated_block(user)) is not None:
                return block
            if user.op == "placeholder" or is_pointwise(user) or name_of(user) in REDUCTIONS:
                pending.append(user)
    return None


# ---------------------------------------------------------------------------------- kinds


def _kind(nodes: Sequence[fx.Node], place: fx.Node) -> str:
    """Return the kind of a saved tensor.

    ``nodes`` share its memory in the forward, ``place`` receives it in the backward.
    """
    if any(map(_is_checkpoints_input, nodes)):
        return "checkpoint"
    if (called := _call_that_reads(place, through_copies=False)) is not None:
        return called
    if any(map(_is_softmaxs_input, _functions(nodes, past_nonlinear=True))):
        return "other"
    functions = _functions(nodes, past_nonlinear=False)
    if any(map(_is_norms_input, functions)):
        return "norm"
    made = any(name_of(each) in NONLINEAR for each in functions if each.op == "call_function" and each not in nodes)
    if made or any(map(_is_factor, functions)):
        return "activation"
    return _call_that_reads(place, through_copies=True) or "other"


def _functions(nodes: Sequence[fx.Node], *, past_nonlinear: bool) -> list[fx.Node]:
    return [each for node in nodes for each in functions_of(node, past_nonlinear=past_nonlinear)]


def _is_checkpoints_input(node: fx.Node) -> bool:
    """Whether a node in another checkpointed region (``meta["ac_graph_id"]``) reads ``node``."""
    own = node.meta.get("ac_graph_id")
    return any((user.meta.get("ac_graph_id") or own) != own for user in readers_of(node, through_copies=True))


def _call_that_reads(place: fx.Node, *, through_copies: bool) -> str | None:
    """Return "gemm", "attention" or "other" for the first call that reads ``place``.

    Pointwise operators, reductions and `READS_ONCE` do not count: None if only these read it. With ``through_copies``,
    calls that read a copy of ``place`` count too.
    """
    for user in readers_of(place, through_copies=through_copies):
        if is_pointwise(user):
            continue
        if (called := kind_of_call(user.target)) is not None:
            return called
        if name_of(user) not in REDUCTIONS | READS_ONCE:
            return "other"
    return None


def _is_softmaxs_input(node: fx.Node) -> bool:
    """Whether a softmax, which amplifies rounding errors, reads a node.

    A maximum of absolute values belongs to an amax, not to a softmax.
    """
    if node.op == "call_function" and name_of(node) == "abs":
        return False
    users = [user for user in users_of(node) if user.op == "call_function" and name_of(user) in SOFTMAX]
    return any(not _is_reduction(user) or _reduces_last_dim(user) for user in users)


def _is_norms_input(node: fx.Node) -> bool:
    for user in users_of(node):
        if user.op == "call_function":
            name = name_of(user)
            if (name in NORMS and user.args[0] is node) or (name in SUMS and _reduces_last_dim(user)):
                return True
    return False


def _is_factor(node: fx.Node) -> bool:
    for user in users_of(node):
        if user.op == "call_function" and name_of(user) == "mul":
            others = [each for each in tensor_inputs(user) if each is not node]
            if any(value_of(each).ndim > 1 for each in others):
                return True
    return False


def _is_reduction(node: fx.Node) -> bool:
    return name_of(node) in REDUCTIONS


def _reduces_last_dim(node: fx.Node) -> bool:
    source = value_of(node.args[0])
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(source, Tensor) or not isinstance(dims, (int, list, tuple)):
        return False
    dims = [dims] if isinstance(dims, int) else list(dims)
    reduced = {dim % source.ndim for dim in dims if isinstance(dim, int)}
    return source.ndim - 1 in reduced and len(reduced) < source.ndim


def _has_values_of_first(node: fx.Node) -> bool:
    return is_view(node) or is_copy(node) or name_of(node) in {"index", "index_select", "gather"}


def _is_realized(node: fx.Node) -> bool:
    """Whether a node is a result of `realize`: a multiplier or a scale."""
    return node.target is stored and node.args[1] == ONCE


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node is a statistic, which never becomes codes.

    It is one if it has one value per row, is computed elementwise from such values, or is not an operator's first
    result.
    """
    current = node
    while current.op == "call_function" and not _is_realized(current) and _has_values_of_first(current):
        current = current.args[0]  # type: ignore[assignment]
    sizes = value_of(node).shape
    if len(sizes) < 2 or (isinstance(sizes[-1], int) and sizes[-1] == 1):
        return True
    if current.target is operator.getitem:
        call: Any = current.args[0]
        return bool(not is_region(call) and name_of(call) not in SPLITS and current.args[1] != 0)
    pending, seen = [current], {current}
    while pending and len(seen) < NEAR:
        each = pending.pop()
        if each.op != "call_function":
            continue
        if _is_realized(each) or (_is_reduction(each) and _reduces_last_dim(each)):
            return True
        if is_pointwise(each):
            size = value_of(each).numel()
            inputs = (one for one in tensor_inputs(each) if one not in seen)
            alike = [one for one in inputs if statically_true(value_of(one).numel() == size)]
            seen.update(alike)
            pending += alike
    return False


# ---------------------------------------------------------------------------------- shape and place


def _hint(size: Any) -> int:
    if is_unbacked(size):
        return 8192
    found: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(found)


def _module(node: fx.Node) -> str:
    """Dotted name of the innermost module whose forward traced a node; empty if there is none."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    path = module_path(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix("_orig_mod.")
