"""The ops that a linear layer is in graphs, whatever its recipe: one for each of its three GEMMs."""

from __future__ import annotations

from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.layer.delayed import delayed_grad_input, delayed_grad_weight, delayed_linear
from fp8compile.ops.layer.fsdp_delayed import fsdp_delayed_linear
from fp8compile.ops.layer.fsdp_grouped import (
    fsdp_grouped_grad_input,
    fsdp_grouped_grad_weight,
    fsdp_grouped_linear,
)
from fp8compile.ops.layer.fsdp_linear import fsdp_grad_input, fsdp_grad_weight, fsdp_linear
from fp8compile.ops.layer.grouped_linear import grouped_grad_input, grouped_grad_weight, grouped_linear
from fp8compile.ops.layer.kept_input import grad_weight_of_codes
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, grad_input, grad_weight, linear
from fp8compile.ops.layer.sharded_grouped import (
    sharded_grouped_grad_input,
    sharded_grouped_grad_weight,
    sharded_grouped_linear,
)
from fp8compile.ops.layer.sharded_linear import sharded_grad_input, sharded_grad_weight, sharded_linear
from fp8compile.ops.scaled_mm import scaled_mm

__all__ = ["GEMM_OPS", "LAYER_OPS"]

# each takes the operands of its GEMM first, as the layer holds them, and the recipe last
LAYER_OPS = {
    linear: OUTPUT,
    grad_input: GRAD_INPUT,
    grad_weight: GRAD_WEIGHT,
    grad_weight_of_codes: GRAD_WEIGHT,
    delayed_linear: OUTPUT,
    delayed_grad_input: GRAD_INPUT,
    delayed_grad_weight: GRAD_WEIGHT,
    fsdp_linear: OUTPUT,
    fsdp_delayed_linear: OUTPUT,
    fsdp_grad_input: GRAD_INPUT,
    fsdp_grad_weight: GRAD_WEIGHT,
    sharded_linear: OUTPUT,
    sharded_grad_input: GRAD_INPUT,
    sharded_grad_weight: GRAD_WEIGHT,
    grouped_linear: OUTPUT,
    grouped_grad_input: GRAD_INPUT,
    grouped_grad_weight: GRAD_WEIGHT,
    fsdp_grouped_linear: OUTPUT,
    fsdp_grouped_grad_input: GRAD_INPUT,
    fsdp_grouped_grad_weight: GRAD_WEIGHT,
    sharded_grouped_linear: OUTPUT,
    sharded_grouped_grad_input: GRAD_INPUT,
    sharded_grouped_grad_weight: GRAD_WEIGHT,
}

# What a policy of selective activation checkpointing names to keep the products: where a plain model has aten.mm, a
# converted one has fp8compile::linear or another of these, and never aten._scaled_mm.
GEMM_OPS = (
    linear,
    delayed_linear,
    fsdp_linear,
    fsdp_delayed_linear,
    sharded_linear,
    grouped_linear,
    fsdp_grouped_linear,
    sharded_grouped_linear,
    scaled_mm,
    scaled_grouped_mm,
    grouped_mm,
)
