"""Amaxes of sharded weights, of all layers in one message at the start of a model's forward.

A layer whose forward runs alone, as activation checkpointing repeats it, sends its own: the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn import Linear
from fp8compile.ops import fsdp_amax
from fp8compile.ops.collectives import all_reduce_amaxes
from fp8compile.ops.layer.quantize import is_aligned
from fp8compile.ops.layer.rows import placed_cuts, rows_cut
from fp8compile.parallel.graph_fsdp.shards import Where, used_dtype
from fp8compile.quantizers import DelayedScaling

__all__ = ["SharedAmaxes", "exchange", "shared_amaxes"]

SLOTS = ("weight", "weight_for_grad_input")


@dataclass(frozen=True)
class SharedAmaxes:
    """What ranks have to tell each other of a layer's weight.

    Attributes:
        grids: For each slot of the recipe whose blocks have elements on several ranks, the shape of its amaxes.
        groups: Names of the groups that these ranks are.
        same: Whether forward and backward quantize the weight alike.
    """

    grids: dict[str, tuple[int, ...]]
    groups: tuple[str, ...]
    same: bool


def shared_amaxes(layer: Linear, local: Tensor, where: Where) -> SharedAmaxes:
    """For a layer of which this rank has ``local``, cut by tensor parallel ranks if there are any, then by rows."""
    every = (*placed_cuts(where.rows.placed, where.tensor_parallel_groups()), rows_cut(where.rows))
    same = layer.recipe.quantizer_read("weight_for_grad_input") == layer.recipe.weight
    shard, grids = Plain(local, TensorLayout(every)), {}
    for slot in SLOTS:
        quantizer = getattr(layer.recipe, slot)
        if quantizer is None or isinstance(quantizer, DelayedScaling) or (same and slot == SLOTS[1]):
            continue
        if not is_aligned(shard, quantizer):
            grids[slot] = tuple(quantizer.scale_shape(shard.whole_shape()))
    return SharedAmaxes(grids, tuple(cut.group for cut in every if cut is not None), same)


def _known(layer: Linear, slot: str) -> Tensor:
    state = layer.graph_fsdp
    where, shared = state.where["weight"], state.shared_amaxes
    shard = layer._parameters["weight"].to_local().detach()  # inference mode can't detach a DTensor
    dtype = used_dtype(where, shard.device.type)
    return fsdp_amax(shard, dtype, where.rows, list(shared.grids[slot]), slot, layer.recipe)


def exchange(layers: Iterable[nn.Module]) -> None:
    """Give each layer the amaxes of its whole weight: one message for each group of ranks, mostly one."""
    entries = [
        (layer, slot)
        for layer in layers
        for slot in layer.graph_fsdp.shared_amaxes.grids
        if slot == SLOTS[0] or torch.is_grad_enabled()
    ]
    known = [_known(layer, slot) for layer, slot in entries]
    groups = [layer.graph_fsdp.shared_amaxes.groups for layer, _ in entries]
    for (layer, slot), amax in zip(entries, all_reduce_amaxes(known, groups), strict=True):
        layer.graph_fsdp.amaxes[slot] = amax
