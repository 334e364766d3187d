"""The ops that compute GEMMs: those of layers, and those that a policy of activation checkpointing names."""

from __future__ import annotations

from fp8compile._compat import OpOverload
from fp8compile.ops.gemms.grouped.grouped_mm import grouped_mm
from fp8compile.ops.gemms.grouped.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.gemms.scaled_mm import scaled_mm
from fp8compile.ops.layer.delayed_linear import delayed_linear
from fp8compile.ops.layer.layer_ops import grad_input, grad_weight, linear
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT
from fp8compile.quantizers import Gemm

__all__ = ["GEMM_OPS", "LAYER_OPS"]

# each op takes the operands of its GEMM first, as the layer holds them, and the recipe last
LAYER_OPS: dict[OpOverload, Gemm] = {
    linear: OUTPUT,
    delayed_linear: OUTPUT,
    grad_input: GRAD_INPUT,
    grad_weight: GRAD_WEIGHT,
}

# The ops that a policy of selective activation checkpointing names to keep the products: where a plain model calls
# aten.mm, a converted model calls one of these ops, and never aten._scaled_mm.
GEMM_OPS = (linear, delayed_linear, scaled_mm, scaled_grouped_mm, grouped_mm)
