"""How parameters flow through the operators of a forward, one operator at a time.

A value is the set of parameters that it was computed from, or DATA. A weight that is scaled, cut, cast or joined with
another is a form of these weights. A product of a form and data is what is looked for.

    x @ weight.t()                      data times a form of weight: a product
    x @ cat(a.weight, b.weight).t()     a product with both
    x * weight.mean()                   data meets a form in no product
    x @ layer(query).t()                data meets data, since a layer in FP8 gives data whatever it is called on
    weight @ weight.t()                 a form, since no data is in it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from fp8compile.nn.parameter_uses.uses import Kind, Slot
from fp8compile.ops import GEMM_OPS, OPS

__all__ = ["DATA", "IN_FLOAT8", "Value", "result_of"]

Value = frozenset[Slot] | None
Met = dict[Kind | str, frozenset[Slot]]
DATA: Value = None
IN_FLOAT8 = "in float8"  # in place of a kind: an operator of this library, or one registered with it
PRODUCTS = frozenset({
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "addmm", "_addmm_activation",
    "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "inner", "bilinear", "_trilinear", "chain_matmul",
    "multi_dot", "linalg_multi_dot", "multi_head_attention_forward", "_scaled_mm", "_scaled_mm_v2", "scaled_mm",
    "_int_mm", "_grouped_mm", "grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "scaled_grouped_mm",
    "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
})  # fmt: skip
CONVOLUTIONS = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "_convolution", "convolution_overrideable",
})  # fmt: skip
LAYERS = frozenset(op.name() for op in GEMM_OPS)  # and other products in FP8
ADDING = frozenset({"addmm", "_addmm_activation", "addmv", "addbmm", "baddbmm"})  # to their first operand
# operators whose names say what they do, and those that send
TORCH = frozenset({
    "aten", "prims", "prim", "c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor",
    "fsdp", "profiler", "rngprims", "inductor",
})  # fmt: skip


def _name_and_namespace(op: Any) -> tuple[str, str]:
    if isinstance(op, str):  # a method of a tensor, in a graph of Dynamo's
        return op, "aten"
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = str(getattr(op, "_qualified_op_name", None) or op.name()).partition("::")
        return name.partition(".")[0], namespace
    module = (getattr(op, "__module__", None) or "torch").partition(".")[0]
    name = getattr(op, "__name__", str(op))
    return name, "aten" if module in ("torch", "_operator", "builtins", "math") else module


def _kind_of(op: Any) -> Kind | str:
    """What an operator does to a parameter that it is called with beside data; `IN_FLOAT8` for ours."""
    name, namespace = _name_and_namespace(op)
    if f"{namespace}::{name}" in OPS:
        return IN_FLOAT8
    if namespace not in TORCH or isinstance(op, HigherOrderOperator):
        return Kind.HANDED
    return Kind.PRODUCT if name in PRODUCTS else Kind.CONVOLUTION if name in CONVOLUTIONS else Kind.OTHER


def result_of(op: Any, operands: Sequence[Value]) -> tuple[Value, Met]:
    """What an operator gives, and which parameters meet data in it, by what becomes of them."""
    name, namespace = _name_and_namespace(op)
    if f"{namespace}::{name}" in LAYERS:
        return DATA, {IN_FLOAT8: _all(operands)}
    if name.endswith("_like") or name.startswith("new_"):
        return DATA, {}  # takes no more than sizes and a dtype
    if DATA not in operands:
        return _all(operands), {}
    if name in ADDING:
        return DATA, {Kind.OTHER: _all(operands[:1]), _kind_of(op): _all(operands[1:])}
    return DATA, {_kind_of(op): _all(operands)}


def _all(operands: Sequence[Value]) -> frozenset[Slot]:
    return frozenset().union(*(each for each in operands if each is not None))
