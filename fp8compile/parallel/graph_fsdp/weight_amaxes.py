"""Exchange amaxes of all layers' weights at the start of a model's forward, in one message a group of ranks.

If a layer's forward runs alone, as when activation checkpointing repeats it, the layer sends its own message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn import Linear
from fp8compile.ops import fsdp_amax
from fp8compile.ops.collectives import all_reduce_amaxes
from fp8compile.ops.layer.fsdp_rows import placed_cuts, rows_cut
from fp8compile.ops.layer.quantize_over_ranks import is_aligned
from fp8compile.parallel.graph_fsdp.shards import ParameterSharding, used_dtype
from fp8compile.quantizers import DelayedScaling

__all__ = ["WeightAmaxPlan", "exchange", "weight_amax_plan"]

ROLES = ("weight", "weight_for_grad_input")


@dataclass(frozen=True)
class WeightAmaxPlan:
    """The amaxes of a layer's weight that ranks exchange: their shapes, and the process groups."""

    # shape of the amaxes, by the recipe's field; only for quantizers whose blocks span several ranks
    grids: dict[str, tuple[int, ...]]
    groups: tuple[str, ...]  # names of the process groups that reduce the amaxes
    same: bool  # whether forward and backward multiply the same codes of the weight

    def exchanged_roles(self) -> list[str]:
        """Return the recipe's fields whose amaxes a forward exchanges: without gradients, none for grad_input."""
        return [role for role in self.grids if role == ROLES[0] or torch.is_grad_enabled()]


def weight_amax_plan(layer: Linear, local: Tensor, sharding: ParameterSharding) -> WeightAmaxPlan:
    """Return which amaxes of a layer's weight ranks exchange; ``local`` is this rank's shard.

    Amaxes are exchanged for blocks that span several ranks. ``sharding`` says how the weight is sharded.
    """
    every = (*placed_cuts(sharding.rows.placed, sharding.tensor_parallel_groups()), rows_cut(sharding.rows))
    same = layer.recipe.quantizer_read("weight_for_grad_input") == layer.recipe.weight
    shard, grids = Plain(local, TensorLayout(every)), {}
    for role in ROLES:
        quantizer = getattr(layer.recipe, role)
        if quantizer is None or isinstance(quantizer, DelayedScaling) or (same and role == ROLES[1]):
            continue
        if not is_aligned(shard, quantizer):
            grids[role] = tuple(quantizer.scale_shape(shard.whole_shape()))
    groups: tuple[Any, ...] = tuple(cut.group for cut in every if cut is not None)
    return WeightAmaxPlan(grids, groups, same)


def _known(layer: Any, role: str) -> Tensor:
    state = layer.graph_fsdp
    sharding, plan = state.shardings["weight"], state.weight_amax_plan
    shard = layer._parameters["weight"].to_local().detach()  # inference mode can't detach a DTensor
    dtype = used_dtype(sharding, shard)
    return fsdp_amax(shard, dtype, sharding.rows, list(plan.grids[role]), role, layer.recipe)


def exchange(layers: Iterable[Any]) -> None:
    """Give each layer the amaxes of its weight's blocks that span several ranks, in one message a group of ranks."""
    entries = [(layer, role) for layer in layers for role in layer.graph_fsdp.weight_amax_plan.exchanged_roles()]
    known = [_known(layer, role) for layer, role in entries]
    groups = [layer.graph_fsdp.weight_amax_plan.groups for layer, _ in entries]
    for (layer, role), amax in zip(entries, all_reduce_amaxes(known, groups), strict=True):
        layer.graph_fsdp.amaxes[role] = amax
