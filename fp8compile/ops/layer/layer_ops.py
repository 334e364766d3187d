"""The ops of linear layers: for each placement, which says what shard of each tensor is on this rank, one op per GEMM.

    linear                    all tensors are whole on this rank
    shared_scale_linear       like linear, with a weight that shares its one scale with other weights
    known_codes_linear        like linear, with a weight whose codes the layer keeps
    delayed_linear            like linear, with the state of delayed scaling
    sharded_linear            each rank of a group has a shard of the weight, and maybe of the tokens
    fsdp_linear               FSDP shards the weight by rows, and ranks gather the rows as codes
    fsdp_delayed_linear       like fsdp_linear, with delayed scaling
    grouped_linear            multiplies each row by the matrix of its group, such as an expert's
    known_codes_grouped_linear  like grouped_linear, with a weight whose codes the layer keeps
    sharded_grouped_linear    each rank of a group has a shard of every matrix
    fsdp_grouped_linear       each rank of FSDP has some of the matrices

A new placement needs a class in `placements` and a line in this module.
"""

from __future__ import annotations

from torch._ops import OpOverload

from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.layer import delayed_scaling_placements, placements, samples
from fp8compile.ops.layer.register_layer import LAYER_OPS, OPS_OF_LAYERS, Layer, register_layer
from fp8compile.ops.scaled_mm import scaled_mm
from fp8compile.quantizers import GEMMS

__all__ = ["GEMM_OPS", "LAYERS", "LAYER_OPS", "OPS_OF_LAYERS"]

LINEAR = register_layer("", placements.Whole, samples.linear_samples)
GROUPED = register_layer("grouped_", placements.WholeGroups, samples.grouped_samples, ends=True)
SHARED_SCALE = register_layer(
    "shared_scale_",
    placements.SharedScale,
    samples.shared_scale_samples,
    for_grad_weight=placements.Whole,
    keep=LINEAR.keep,
)
KNOWN_CODES = register_layer(
    "known_codes_",
    placements.KnownCodes,
    samples.known_codes_samples,
    for_grad_input=placements.KnownForGradInput,
    for_grad_weight=placements.Placement,
    keep=LINEAR.keep,
    observe=LINEAR.observe,
)
KNOWN_CODES_GROUPED = register_layer(
    "known_codes_grouped_",
    placements.KnownCodesOfGroups,
    samples.known_codes_of_groups_samples,
    for_grad_input=placements.KnownForGradInputOfGroups,
    for_grad_weight=placements.WholeGroups,
    ends=True,
    keep=GROUPED.keep,
    observe=GROUPED.observe,
)
DELAYED = register_layer(
    "delayed_",
    delayed_scaling_placements.Delayed,
    samples.delayed_samples,
    for_grad_input=delayed_scaling_placements.DelayedForGradient,
    for_grad_weight=delayed_scaling_placements.DelayedForGradient,
    keep=LINEAR.keep,
)
SHARDED = register_layer("sharded_", placements.CutOverGroup, samples.sharded_samples)
SHARDED_GROUPED = register_layer(
    "sharded_grouped_", placements.GroupsCutOverGroup, samples.sharded_grouped_samples, ends=True
)
FSDP = register_layer(
    "fsdp_",
    placements.RowsOverFsdp,
    samples.fsdp_samples,
    for_grad_input=placements.RowsOverFsdpForGradInput,
    for_grad_weight=placements.RowsOverFsdpForGradWeight,
    keep=LINEAR.keep,
)
FSDP_DELAYED = register_layer(
    "fsdp_delayed_", delayed_scaling_placements.DelayedOverFsdp, samples.fsdp_delayed_samples, gradients=FSDP
)
FSDP_GROUPED = register_layer(
    "fsdp_grouped_",
    placements.GroupsOverFsdp,
    samples.fsdp_grouped_samples,
    for_grad_weight=placements.GroupsOverFsdpForGradWeight,
    ends=True,
    keep=GROUPED.keep,
)
LAYERS: tuple[Layer, ...] = (
    LINEAR, SHARED_SCALE, KNOWN_CODES, DELAYED, SHARDED, FSDP, FSDP_DELAYED,
    GROUPED, KNOWN_CODES_GROUPED, SHARDED_GROUPED, FSDP_GROUPED,
)  # fmt: skip

# the names that fp8compile.ops exports
linear: OpOverload = LINEAR.output
grad_input: OpOverload = LINEAR.grad_input
grad_weight: OpOverload = LINEAR.grad_weight
kept_input: OpOverload = LINEAR.keep
grad_weight_of_codes: OpOverload = LINEAR.grad_weight_of_codes
shared_scale_linear: OpOverload = SHARED_SCALE.output
known_codes_linear: OpOverload = KNOWN_CODES.output
known_codes_grad_input: OpOverload = KNOWN_CODES.grad_input
known_codes_grouped_linear: OpOverload = KNOWN_CODES_GROUPED.output
known_codes_grouped_grad_input: OpOverload = KNOWN_CODES_GROUPED.grad_input
delayed_linear: OpOverload = DELAYED.output
delayed_grad_input: OpOverload = DELAYED.grad_input
delayed_grad_weight: OpOverload = DELAYED.grad_weight
sharded_linear: OpOverload = SHARDED.output
sharded_grad_input: OpOverload = SHARDED.grad_input
sharded_grad_weight: OpOverload = SHARDED.grad_weight
fsdp_linear: OpOverload = FSDP.output
fsdp_delayed_linear: OpOverload = FSDP_DELAYED.output
fsdp_grad_input: OpOverload = FSDP.grad_input
fsdp_grad_weight: OpOverload = FSDP.grad_weight
grouped_linear: OpOverload = GROUPED.output
grouped_grad_input: OpOverload = GROUPED.grad_input
grouped_grad_weight: OpOverload = GROUPED.grad_weight
sharded_grouped_linear: OpOverload = SHARDED_GROUPED.output
sharded_grouped_grad_input: OpOverload = SHARDED_GROUPED.grad_input
sharded_grouped_grad_weight: OpOverload = SHARDED_GROUPED.grad_weight
fsdp_grouped_linear: OpOverload = FSDP_GROUPED.output
fsdp_grouped_grad_input: OpOverload = FSDP_GROUPED.grad_input
fsdp_grouped_grad_weight: OpOverload = FSDP_GROUPED.grad_weight

# The ops that a policy of selective activation checkpointing names to keep the products: where a plain model calls
# aten.mm, a converted model calls one of these ops, and never aten._scaled_mm.
GEMM_OPS = (*(op for op, gemm in LAYER_OPS.items() if gemm is GEMMS[0]), scaled_mm, scaled_grouped_mm, grouped_mm)
