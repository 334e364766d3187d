"""The ops that a linear layer is in graphs, whatever its recipe: one for each of its three GEMMs."""

from __future__ import annotations

from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.scaled_grouped_mm import scaled_grouped_mm

# each family registers its own
from fp8compile.ops.layer import (
    delayed,
    fsdp_delayed,
    fsdp_grouped,
    fsdp_linear,
    grouped_linear,
    kept_input,
    linear,
    sharded_grouped,
    sharded_linear,
)
from fp8compile.ops.layer.register_product import LAYER_OPS
from fp8compile.ops.scaled_mm import scaled_mm
from fp8compile.quantizers import GEMMS

__all__ = ["FAMILIES", "GEMM_OPS", "LAYER_OPS"]

FAMILIES = (
    linear,
    delayed,
    sharded_linear,
    fsdp_linear,
    fsdp_delayed,
    grouped_linear,
    fsdp_grouped,
    sharded_grouped,
    kept_input,
)

# What a policy of selective activation checkpointing names to keep the products: where a plain model has aten.mm, a
# converted one has fp8compile::linear or another of these, and never aten._scaled_mm.
GEMM_OPS = (*(op for op, gemm in LAYER_OPS.items() if gemm is GEMMS[0]), scaled_mm, scaled_grouped_mm, grouped_mm)
