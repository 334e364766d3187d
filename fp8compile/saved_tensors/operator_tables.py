"""Tables of operator names, used to classify a saved tensor by the operators that read it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "COPIES",
    "GEMMS",
    "NONLINEAR",
    "NORMS",
    "PARTS",
    "READS_ONCE",
    "REDUCTIONS",
    "SOFTMAX",
    "SPLITS",
    "SUMS",
    "VIEWS",
    "kind_of_call",
    "operator_name",
]

SPLITS = {"split", "split_with_sizes", "unbind", "chunk"}
PARTS = {"select", "slice", "as_strided", *SPLITS}
VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "transpose",
    "permute",
    "t",
    "unsqueeze",
    "squeeze",
    "expand",
    "alias",
    *PARTS,
}
COPIES = {"_to_copy", "clone", "detach", "convert_element_type"}
NONLINEAR = {
    "exp", "exp2", "sigmoid", "tanh", "erf", "erfc", "silu", "gelu", "softplus", "mish", "hardswish",
    "relu", "leaky_relu", "elu",
}  # fmt: skip
NORMS = {"rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm", "native_group_norm"}
# over the last dim they are the statistic of a norm
SUMS = {"sum", "mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"}
REDUCTIONS = SUMS | {"amax", "amin", "logsumexp", "prod", "max", "min", "prepare_softmax_online"}
SOFTMAX = {"amax", "max", "logsumexp", "prepare_softmax_online", "_softmax", "_log_softmax", "_safe_softmax"}
# what Inductor fuses, or a kernel of PyTorch that reads each element once
READS_ONCE = {
    "native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward", "native_dropout_backward",
    "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "softplus_backward", "mish_backward",
    "hardswish_backward", "cat", "index", "gather", "scatter", "scatter_add", "index_put", "index_add",
    "select_scatter", "slice_scatter", "slice_backward", "select_backward", "constant_pad_nd", "cumsum", "flip",
}  # fmt: skip
GEMMS = {
    "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm",
    "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "convolution", "convolution_backward",
}  # fmt: skip


def operator_name(target: Any) -> str:
    """Name of an operator, the target of an FX node, without namespace and overload."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(target, "__name__", str(target))


def kind_of_call(target: Any) -> str | None:
    """Kind of a saved tensor that the operator ``target`` reads: "attention" or "gemm"; None for others."""
    name = operator_name(target)
    if "attention" in name:
        return "attention"
    return "gemm" if name in GEMMS or getattr(target, "namespace", "") == "fp8compile" else None
