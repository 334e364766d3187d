"""What a saved tensor is, read from the forward and backward graphs that it goes between.

Graphs may be decomposed by Inductor or not, and may call graphs of compiled regions. Nodes are followed through views,
casts and calls of regions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile._compat import statically_true
from fp8compile.inductor import noted_block
from fp8compile.inductor.fusion import COPIES, VIEWS
from fp8compile.saved_tensors.saved_tensor import SavedTensor

__all__ = ["block_beside", "described", "source_of"]

# ---------------------------------------------------------------------------------- operators, by name

SPLITS = {"split", "split_with_sizes", "unbind", "chunk"}
PARTS = {"select", "slice", "as_strided", *SPLITS}
HINTS = {"realize", "after", "store", "snapshot"}  # copies of ours
NONLINEAR = {"exp", "exp2", "sigmoid", "tanh", "erf", "erfc", "silu", "gelu", "softplus", "mish", "hardswish"}
SQUARES = {"pow", "square", "mul"}
SUMS = {"sum", "mean"}
SPREADS = {"var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"}
REDUCTIONS = SUMS | SPREADS | {"amax", "amin", "logsumexp", "prod", "max", "min"}
NORMS = {"rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm", "native_group_norm"}
# what Inductor fuses, or a kernel of PyTorch that reads each element once
READS_ONCE = {
    "native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward", "native_dropout_backward",
    "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "softplus_backward", "mish_backward",
    "hardswish_backward", "cat", "index", "gather", "scatter", "scatter_add", "index_put", "index_add", "select_scatter",
    "slice_scatter", "slice_backward", "select_backward", "constant_pad_nd", "cumsum", "flip",
}  # fmt: skip
GEMMS = {
    "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm",
    "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "convolution", "convolution_backward",
}  # fmt: skip
NEAR = 256  # nodes to look at around a tensor: more than a feed-forward block has


def _name(node: fx.Node) -> str:
    """The name of the operator that a node calls, without namespace and overload."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(target, "__name__", str(target))


def _namespace(node: fx.Node) -> str:
    return getattr(node.target, "namespace", "")


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return source.op == "call_function" and _name(source) in SPLITS
    return node.target in VIEWS or _name(node) in PARTS


def _is_copy(node: fx.Node) -> bool:
    return node.target in COPIES or (_namespace(node) == "fp8compile" and _name(node) in HINTS)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _is_view(node) or _is_copy(node)


def _is_region(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The floating-point tensors that a node computes with; masks, indices and constants are left out."""
    tensors = [each for each in node.all_input_nodes if isinstance(_value(each), Tensor)]
    return [each for each in tensors if _value(each).is_floating_point() and not _is_constant(each)]


def _is_constant(node: fx.Node) -> bool:
    """Whether a node is made of numbers alone."""
    return node.op == "call_function" and not any(isinstance(_value(each), Tensor) for each in node.all_input_nodes)


# ---------------------------------------------------------------------------------- walks


def _body(call: fx.Node) -> fx.Graph:
    """The graph that a region's call runs."""
    holder: Any = call.args[0]
    owner = call.graph.owning_module
    assert owner is not None, "a graph that calls a region belongs to a module, which has the region's graph"
    return owner.get_submodule(holder.target).graph


def _same_memory(node: fx.Node) -> list[fx.Node]:
    """A node, and the nodes in whose memory it lies, back to the one that makes it, maybe in the graph of a region."""
    found = [node]
    while (node := found[-1]).op == "call_function":
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and _is_region(source):
            body = _body(source)
            results: Any = body.output_node().args[0]
            inner = _same_memory(results[node.args[1]])
            if inner[-1].op != "placeholder":
                return found + inner
            # the region returns its own argument, which it saves for its backward
            found.append(source.args[2 + body.find_nodes(op="placeholder").index(inner[-1])])
        elif _is_view(node):
            found.append(source)
        else:
            break
    return found


def source_of(node: fx.Node) -> fx.Node:
    """The node of the same graph that makes the memory in which a node lies; calls of one region make different ones."""
    return [each for each in _same_memory(node) if each.graph is node.graph][-1]


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node; in place of a region's call, the region's placeholders that stand for the node."""
    for user in node.users:
        if user.op == "output":
            continue
        if not _is_region(user):
            yield user
            continue
        places = _body(user).find_nodes(op="placeholder")
        yield from (place for place, operand in zip(places, user.args[2:], strict=True) if operand is node)


def _readers(node: fx.Node, *, through_copies: bool) -> list[fx.Node]:
    """The nodes that read the values of a node, also through views and, if asked for, through casts and copies."""
    found, pending, seen = [], [node], {node}
    while pending:
        for user in _users(pending.pop()):
            if user in seen:
                continue
            seen.add(user)
            if user.op == "placeholder" or _is_view(user) or (through_copies and _is_copy(user)):
                pending.append(user)
            else:
                found.append(user)
    return found


def _functions(node: fx.Node, *, sums: bool = False) -> dict[fx.Node, None]:
    """The nodes that are computed from one node alone, element by element, itself included, up to `NONLINEAR` ones.

    With ``sums`` other tensors may be added, as the residual stream is.
    """
    found, pending = {node: None}, [node]
    while pending and len(found) < NEAR:
        current = pending.pop()
        if current.op == "call_function" and current is not node and _name(current) in NONLINEAR:
            continue
        for user in _users(current):
            alone = user.op == "placeholder" or (
                _is_pointwise(user)
                and ((sums and _name(user) == "add") or all(each in found for each in _tensor_inputs(user)))
            )
            if alone and user not in found:
                found[user] = None
                pending.append(user)
    return found


def _is_of_nonlinear(node: fx.Node) -> bool:
    """Whether a node is computed element by element from the result of one of `NONLINEAR`."""
    pending, seen = [node], {node}
    while pending and len(seen) < NEAR:
        current = pending.pop()
        if current.op != "call_function" or not _is_pointwise(current):
            continue
        if _name(current) in NONLINEAR:
            return True
        new = [each for each in _tensor_inputs(current) if each not in seen]
        seen.update(new)
        pending += new
    return False


# ---------------------------------------------------------------------------------- kinds


def _reduces_last_dim(node: fx.Node) -> bool:
    """Whether a node reduces the last dim of its input, and not all dims to one number."""
    source = _value(node.args[0])
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(source, Tensor) or not isinstance(dims, (int, list, tuple)):
        return False
    dims = [dims] if isinstance(dims, int) else list(dims)
    reduced = {dim % source.ndim for dim in dims if isinstance(dim, int)}
    return source.ndim - 1 in reduced and len(reduced) < source.ndim


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node has one value for a row, computed from the row; or is a result of a call beside its first one."""
    current = node
    while current.op == "call_function" and (_is_view(current) or _is_copy(current)):
        if _name(current) == "realize":  # the multipliers of blocks
            return True
        current = current.args[0]  # type: ignore[assignment]
    if current.target is operator.getitem:
        source, index = current.args
        return not _is_region(source) and _name(source) not in SPLITS and index != 0  # type: ignore[arg-type]
    sizes = _value(node).shape
    if len(sizes) < 2 or (isinstance(sizes[-1], int) and sizes[-1] == 1):
        return True
    pending, seen = [current], {current}
    while pending and len(seen) < NEAR:
        each = pending.pop()
        if each.op != "call_function":
            continue
        if _name(each) in REDUCTIONS and _reduces_last_dim(each):
            return True
        if _is_pointwise(each):
            size = _value(each).numel()
            inputs = (one for one in _tensor_inputs(each) if one not in seen)
            alike = [one for one in inputs if statically_true(_value(one).numel() == size)]
            seen.update(alike)
            pending += alike
    return False


def _is_square(node: fx.Node) -> bool:
    if node.op != "call_function" or _name(node) not in SQUARES:
        return False
    if _name(node) == "pow":
        return node.args[1] == 2
    return _name(node) == "square" or node.args[0] is node.args[1]


def _is_norms_input(functions: dict[fx.Node, None]) -> bool:
    for node in functions:
        for user in _users(node):
            if user.op != "call_function":
                continue
            name = _name(user)
            if name in NORMS and user.args[0] is node:
                return True
            if name in SPREADS and _reduces_last_dim(user):
                return True
            if name in SUMS and _is_square(node) and _reduces_last_dim(user):
                return True
    return False


def _is_activations_input(node: fx.Node, functions: dict[fx.Node, None]) -> bool:
    if any(each.op == "call_function" and _name(each) in NONLINEAR for each in functions if each is not node):
        return True
    for each in functions:
        for user in _users(each):
            if user.op != "call_function" or _name(user) != "mul":
                continue
            others = [other for other in _tensor_inputs(user) if other not in functions]
            if any(map(_is_of_nonlinear, others)) or (others and _is_of_nonlinear(each)):
                return True
    return False


def _is_checkpoints_input(node: fx.Node) -> bool:
    """Whether a checkpointed region, in which the node is not, reads it. PyTorch numbers regions from 1 on."""
    own = node.meta.get("ac_graph_id")
    return any((user.meta.get("ac_graph_id") or own) != own for user in _readers(node, through_copies=True))


def _call_that_reads(place: fx.Node) -> str | None:
    """The kind of a call that reads a tensor itself, and not in a kernel that computes something from each element."""
    for user in _readers(place, through_copies=False):
        name = _name(user)
        if "attention" in name:
            return "attention"
        if name in GEMMS or (_namespace(user) == "fp8compile" and name not in HINTS):
            return "gemm"
        if not (_is_pointwise(user) or name in REDUCTIONS or name in READS_ONCE):
            return "other"
    return None


def _kind(nodes: Sequence[fx.Node], place: fx.Node) -> str:
    """The kind of a saved tensor; ``nodes`` are the one that is saved and those of the same memory."""
    if any(map(_is_checkpoints_input, nodes)):
        return "checkpoint"
    if (called := _call_that_reads(place)) is not None:
        return called
    # min-cut may keep what a layer adds to the residual stream, and add it again
    if any(_is_norms_input(_functions(node, sums=True)) for node in nodes):
        return "norm"
    functions = {node: _functions(node) for node in nodes}
    return "activation" if any(_is_activations_input(*each) for each in functions.items()) else "other"


def described(node: fx.Node, place: fx.Node) -> SavedTensor | None:
    """What a saved tensor is; None if it is never packed: no floating-point tensor, or a statistic.

    Args:
        node: The node of the forward graph that makes it.
        place: The placeholder of the backward graph that stands for it.
    """
    value = _value(node)
    if not isinstance(value, Tensor) or value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    nodes = _same_memory(node)
    source = nodes[-1]
    if source.op != "call_function" or _is_statistic(source):
        return None
    return SavedTensor(
        kind=_kind(nodes, place),
        shape=tuple(_hint(size) for size in value.shape),
        dtype=value.dtype,
        module=_module(source),
        made_by=_name(source),
    )


def _hint(size: Any) -> int:
    """A size as a number: a dynamic size is that of the first call, one that is data counts as large."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if hasattr(size, "node") and size.node.has_hint() else None
    return 8192 if hint is None else int(hint)


def _module(node: fx.Node) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    for before, after in (("L['self']", ""), ("_modules['", ""), ("']", ""), ("._orig_mod", ""), ("L['fn']", "")):
        path = path.replace(before, after)
    return path.strip(".")


def block_beside(node: fx.Node, place: fx.Node) -> tuple[int, int] | None:
    """The block of the nearest cast that is computed from a saved tensor, in the forward or else in the backward."""
    starts = (*_same_memory(node), place)
    return next((block for start in starts if (block := _nearest_block(start)) is not None), None)


def _nearest_block(start: fx.Node) -> tuple[int, int] | None:
    pending, seen = [start], {start}
    for current in pending:  # the list grows: nearer nodes come first
        for user in _users(current):
            if user in seen or len(seen) > NEAR:
                continue
            seen.add(user)
            if (block := noted_block(user)) is not None:
                return block
            if user.op == "placeholder" or _is_pointwise(user) or _name(user) in REDUCTIONS:
                pending.append(user)
    return None
