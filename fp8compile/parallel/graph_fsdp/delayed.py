"""Delayed scaling of sharded layers: who is to know of which amaxes, and that all of them travel in one message.

See `fp8compile.ops.layer.amax_tokens` for how a backward brings them together. A layer that is called once more in a
forward, or outside of the model's, sends its own.
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
from fp8compile.ops import fsdp_amaxes_together, fsdp_tokens
from fp8compile.ops.layer.amax_tokens import AmaxGroups
from fp8compile.parallel.graph_fsdp.shards import Where

__all__ = ["Later", "Tokens", "give", "later_amaxes", "take"]

Tokens = tuple[Tensor | None, Tensor | None]


class Later(NamedTuple):
    """Over which ranks a backward of a layer reduces amaxes, those of activations and those of the weight.

    Attributes:
        names: Of their groups.
        groups: The same for the op, for PyTorch 2.11 traces no attribute of a constant; None for no group.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    groups: tuple[AmaxGroups | None, AmaxGroups | None]


def _without_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Groups without those all of whose ranks another one has."""
    ranks = {name: set(get_process_group_ranks(_resolve_process_group(name))) for name in dict.fromkeys(names)}
    found: list[str] = []
    for name, own in sorted(ranks.items(), key=lambda each: -len(each[1])):
        if not any(own <= ranks[other] for other in found):
            found.append(name)
    return tuple(found)


def later_amaxes(layer: Linear, where: Where) -> Later | None:
    """For a layer that was just sharded; None without delayed scaling."""
    if not layer.recipe.history():
        return None
    of_layer = () if layer.amax_group is None else (layer.amax_group,)
    rows = (where.rows.group,) if len(where.rows.sizes) > 1 else ()
    of_weight = (*of_layer, *rows, *where.tensor_parallel_groups())
    names = _without_parts(of_layer), _without_parts(of_weight)
    return Later(names, tuple(AmaxGroups(each) if each else None for each in names))


def _origin(layer: Linear, module: nn.Module, inputs: Any) -> Tensor | None:
    """Something whose gradient a backward through this layer computes; None if there is no backward."""
    weight = layer._parameters["weight"]
    if weight.requires_grad:
        return weight
    every = (*module.parameters(), *pytree.tree_leaves(inputs))
    return next((each for each in every if isinstance(each, Tensor) and each.requires_grad), None)


def _together(tokens: list[Tensor], groups: AmaxGroups | None) -> Sequence[Tensor]:
    """The tokens anew, whose gradients are the amaxes of all these ranks."""
    if groups is None:
        return tokens
    return fsdp_amaxes_together(torch.cat(tokens), groups).split([token.numel() for token in tokens])


def expect(layers: Sequence[nn.Module], module: nn.Module, inputs: Any) -> list[Tokens]:
    """Tokens by which the backward of this forward gets the amaxes of layers, those of activations and of the weight.

    Args:
        layers: Those that this forward runs.
        module: Whose forward it is.
        inputs: Of it.

    Returns:
        Two for each layer; None, None where it has no delayed scaling, or no backward.
    """
    found: list[Tokens] = [(None, None)] * len(layers)
    messages: dict[tuple[str, ...], list[tuple[int, int, Tensor]]] = {}
    kinds: dict[tuple[str, ...], AmaxGroups | None] = {}
    for index, layer in enumerate(layers):
        later = layer.graph_fsdp.later
        origin = _origin(layer, module, inputs) if later is not None and torch.is_grad_enabled() else None
        if origin is None:
            continue
        state = layer.delayed_state()
        history, multiplier = _compat.replicated(state.amax_history), _compat.replicated(state.multiplier)
        tokens = fsdp_tokens(origin, history, multiplier, layer.recipe)
        for place, names in enumerate(later.names):
            kinds[names] = later.groups[place]
            messages.setdefault(names, []).append((index, place, tokens[place]))
    for names, entries in messages.items():
        together = _together([token for _, _, token in entries], kinds[names])
        for (index, place, _), token in zip(entries, together, strict=True):
            found[index] = (token, None) if place == 0 else (found[index][0], token)
    return found


# ---------------------------------------------------------------------------------- the first call takes them

UNTAKEN: set[int] = set()  # while Dynamo traces: layers that the model's forward gave tokens


@_compat.constant_when_traced
def _offer(keys: tuple[int, ...]) -> None:
    UNTAKEN.update(keys)


@_compat.constant_when_traced
def _take(key: int) -> bool:
    is_first = key in UNTAKEN
    UNTAKEN.discard(key)
    return is_first


def give(layers: Sequence[nn.Module], module: nn.Module, inputs: Any) -> None:
    """Have the first call of each layer in a model's forward use tokens of one message; arguments as of `expect`."""
    for layer, tokens in zip(layers, expect(layers, module, inputs), strict=True):
        layer.graph_fsdp.tokens = tokens
    if torch.compiler.is_dynamo_compiling():
        _offer(tuple([layer.graph_fsdp.key for layer in layers]))


def take(layer: Linear, x: Tensor) -> Tokens:
    """What a call of a layer uses: what `give` gave, once, for gradients of two uses would be added; or its own."""
    state = layer.graph_fsdp
    if torch.compiler.is_dynamo_compiling():
        # what activation checkpointing repeats may change nothing that Dynamo sees
        tokens = state.tokens if _take(state.key) else None
    else:
        tokens, state.tokens = state.tokens, None
    return expect([layer], layer, x)[0] if tokens is None else tokens
