"""How parameters flow through the operators of a forward, one operator at a time.

Each tensor of the forward has a value: the set of parameters that it was computed from, or DATA if anything else went
into it. A tensor computed from weights alone, by scaling, slicing, casting or concatenation, is called a form of these
weights. The search is for products of a form and data.

    x @ weight.t()                      a product of data and a form of weight
    x @ cat(a.weight, b.weight).t()     a product of data and a form of both weights
    x * weight.mean()                   data meets a form, but not in a product
    x @ layer(query).t()                data meets data, because the result of an FP8 layer is always data
    weight @ weight.t()                 a form, because there is no data in it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8compile._compat import HigherOrderOperator, OpOverload
from fp8compile.nn.parameter_uses.uses import Kind, Met, Slot
from fp8compile.ops import GEMM_OPS, OPS

__all__ = ["DATA", "Value", "result_of"]

Value = frozenset[Slot] | None
DATA: Value = None
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
LAYERS = frozenset(op.name() for op in GEMM_OPS)  # this library's layers and other FP8 products
# they add the product to their first operand
ADDING = frozenset({"addmm", "_addmm_activation", "addmv", "addbmm", "baddbmm"})
# namespaces of PyTorch's operators, whose names tell what they do, and of collectives
TORCH = frozenset({
    "aten", "prims", "prim", "c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor",
    "fsdp", "profiler", "rngprims", "inductor",
})  # fmt: skip


def _name_and_namespace(op: Any) -> tuple[str, str]:
    if isinstance(op, str):  # a method of a tensor, in a graph of Dynamo's
        return op, "aten"
    if isinstance(op, (OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = str(getattr(op, "_qualified_op_name", None) or op.name()).partition("::")
        return name.partition(".")[0], namespace
    module = (getattr(op, "__module__", None) or "torch").partition(".")[0]
    name = getattr(op, "__name__", str(op))
    return name, "aten" if module in ("torch", "_operator", "builtins", "math") else module


def _kind_of(op: Any) -> Kind:
    name, namespace = _name_and_namespace(op)
    if f"{namespace}::{name}" in OPS:
        return Kind.FLOAT8
    if namespace not in TORCH or isinstance(op, HigherOrderOperator):
        return Kind.HANDED
    return Kind.PRODUCT if name in PRODUCTS else Kind.CONVOLUTION if name in CONVOLUTIONS else Kind.OTHER


def result_of(op: Any, operands: Sequence[Value]) -> tuple[Value, Met]:
    """Return the value of an operator's result, and the parameters that meet data in the operator, by `Kind`.

    ``operands`` has the value of each tensor argument. A value is a set of parameters, or None (DATA).
    """
    name, namespace = _name_and_namespace(op)
    if f"{namespace}::{name}" in LAYERS:
        return DATA, {Kind.FLOAT8: _all(operands)}
    if name.endswith("_like") or name.startswith("new_"):
        return DATA, {}  # the op reads only sizes and dtype of its operand
    if DATA not in operands:
        return _all(operands), {}
    if name in ADDING:
        return DATA, {Kind.OTHER: _all(operands[:1]), _kind_of(op): _all(operands[1:])}
    return DATA, {_kind_of(op): _all(operands)}


def _all(operands: Sequence[Value]) -> frozenset[Slot]:
    return frozenset().union(*(each for each in operands if each is not None))
