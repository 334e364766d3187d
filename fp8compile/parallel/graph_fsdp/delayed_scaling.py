"""Delayed scaling of layers that graph_fsdp shards: ranks reduce the amaxes of all layers in one message.

Each layer gets an amax carrier, a pair of zero tensors whose gradients are the layer's amaxes
(`fp8compile.ops.layer.fsdp_delayed_amaxes`). A layer's second call in a forward, and a call outside of the model's
forward, send their own messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree

from fp8compile import _compat
from fp8compile.nn import Linear
from fp8compile.ops import fsdp_amax_carriers, fsdp_amaxes_together
from fp8compile.ops.layer.fsdp_delayed_amaxes import AmaxGroups
from fp8compile.parallel.graph_fsdp.shards import ParameterSharding

__all__ = ["AmaxCarrier", "AmaxReduction", "amax_reduction", "attach", "consume"]

AmaxCarrier = tuple[Tensor | None, Tensor | None]  # tokens for a layer's activations, and for its weight


class AmaxReduction(NamedTuple):
    """The process groups over which a layer's backward reduces amaxes: of activations, and of the weight."""

    names: tuple[tuple[str, ...], tuple[str, ...]]  # names of the process groups
    # the same groups as the op takes them, because PyTorch 2.11 traces no attribute of a constant; None if there is no
    # group
    groups: tuple[AmaxGroups | None, AmaxGroups | None]


def _without_parts(names: Iterable[Any]) -> tuple[str, ...]:
    ranks = {name: set(get_process_group_ranks(_resolve_process_group(name))) for name in dict.fromkeys(names)}
    found: list[str] = []
    for name, own in sorted(ranks.items(), key=lambda each: -len(each[1])):
        if not any(own <= ranks[other] for other in found):
            found.append(name)
    return tuple(found)


def amax_reduction(layer: Linear, sharding: ParameterSharding) -> AmaxReduction | None:
    """Return the groups that reduce a sharded layer's amaxes; None for a layer without delayed scaling.

    ``sharding`` says how the layer's weight is sharded.
    """
    if not layer.recipe.history():
        return None
    of_layer = () if layer.amax_group is None else (layer.amax_group,)
    rows = (sharding.rows.group,) if len(sharding.rows.sizes) > 1 else ()
    of_weight = (*of_layer, *rows, *sharding.tensor_parallel_groups())
    names = _without_parts(of_layer), _without_parts(of_weight)
    groups: Any = tuple(AmaxGroups(each) if each else None for each in names)
    return AmaxReduction(names, groups)


def _origin(layer: Any, module: nn.Module, inputs: Any) -> Tensor | None:
    """Return a tensor that requires grad, from which an amax carrier can be made; None if there is no backward."""
    weight = layer._parameters["weight"]
    if weight.requires_grad:
        return weight
    every = (*module.parameters(), *pytree.tree_leaves(inputs))
    return next((each for each in every if isinstance(each, Tensor) and each.requires_grad), None)


def _together(tokens: list[Tensor], groups: AmaxGroups | None) -> Sequence[Tensor]:
    """Let the backward reduce the gradients of ``tokens``, which are amaxes, over ``groups`` in one message."""
    if groups is None:
        return tokens
    return fsdp_amaxes_together(torch.cat(tokens), groups).split([token.numel() for token in tokens])


def assign(layers: Sequence[Any], module: nn.Module, inputs: Any) -> list[AmaxCarrier]:
    """Make an amax carrier for each of ``layers``: a pair of zero tensors whose gradients are the layer's amaxes.

    The layers have delayed scaling. Without a backward, a layer gets (None, None). ``module`` is the module whose
    forward, on ``inputs``, runs these layers.
    """
    found: list[AmaxCarrier] = [(None, None)] * len(layers)
    messages: dict[tuple[str, ...], list[tuple[int, int, Tensor]]] = {}
    kinds: dict[tuple[str, ...], AmaxGroups | None] = {}
    for index, layer in enumerate(layers):
        reduction = layer.graph_fsdp.amax_reduction
        origin = _origin(layer, module, inputs) if torch.is_grad_enabled() else None
        if origin is None:
            continue
        state = layer.delayed_state()
        history, multiplier = _compat.replicated(state.amax_history), _compat.replicated(state.multiplier)
        tokens = fsdp_amax_carriers(origin, history, multiplier, layer.recipe)
        for place, names in enumerate(reduction.names):
            kinds[names] = reduction.groups[place]
            messages.setdefault(names, []).append((index, place, tokens[place]))
    for names, entries in messages.items():
        together = _together([token for _, _, token in entries], kinds[names])
        for (index, place, _), token in zip(entries, together, strict=True):
            found[index] = (token, None) if place == 0 else (found[index][0], token)
    return found


# ---------------------------------------------------------------------------------- the first call consumes them

UNCONSUMED: set[int] = set()  # keys of layers with an attached, unused carrier; only while Dynamo traces


@_compat.constant_when_traced
def _mark_attached(keys: tuple[int, ...]) -> None:
    UNCONSUMED.update(keys)


@_compat.constant_when_traced
def _mark_consumed(key: int) -> bool:
    is_first = key in UNCONSUMED
    UNCONSUMED.discard(key)
    return is_first


def attach(layers: Sequence[Any], module: nn.Module, inputs: Any) -> None:
    """Attach an amax carrier (see `assign`) to each layer for its first call; one message sends all amaxes."""
    for layer, carrier in zip(layers, assign(layers, module, inputs), strict=True):
        layer.graph_fsdp.carrier = carrier
    if torch.compiler.is_dynamo_compiling():
        _mark_attached(tuple([layer.graph_fsdp.key for layer in layers]))


def consume(layer: Any, x: Tensor) -> AmaxCarrier:
    """Return the amax carrier (see `assign`) for a call of a layer; ``x`` is its input.

    The first call takes the attached carrier. Later calls get new ones, because autograd would add the gradients.
    """
    state = layer.graph_fsdp
    if torch.compiler.is_dynamo_compiling():
        # code that activation checkpointing repeats must not change state that Dynamo sees
        carrier = state.carrier if _mark_consumed(state.key) else None
    else:
        carrier, state.carrier = state.carrier, None
    return assign([layer], layer, x)[0] if carrier is None else carrier
