"""Sample arguments of the layer ops for one rank; more ranks need processes (tests/parallel)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.ops import samples
from fp8compile.ops.amax import amax
from fp8compile.ops.groups.scaled_grouped_mm import sample_offsets
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.make_weight_codes import flat_sets, sets_of_weight
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Recipe

__all__ = [
    "delayed_samples",
    "fsdp_delayed_samples",
    "fsdp_grouped_samples",
    "fsdp_samples",
    "grouped_samples",
    "known_codes_of_groups_samples",
    "known_codes_samples",
    "linear_samples",
    "sharded_grouped_samples",
    "sharded_samples",
    "shared_scale_samples",
]


def linear_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::linear."""
    generator = torch.Generator().manual_seed(0)
    for x in samples.matrices():
        for recipe in samples.recipes():
            weight = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype)
            yield x, weight, torch.ones(40, dtype=x.dtype), recipe
    yield x, weight, None, recipe


def shared_scale_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::shared_scale_linear."""
    for x, weight, bias, recipe in linear_samples():
        yield x, weight, bias, torch.full((1,), 6.0), recipe


def known_codes_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::known_codes_linear."""
    for x, weight, bias, recipe in linear_samples():
        if None not in (recipe.weight, recipe.weight_for_grad_input):
            yield x, weight, bias, *flat_sets(sets_of_weight(weight, recipe)), recipe


def known_codes_of_groups_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::known_codes_grouped_linear."""
    for x, weight, offsets, bias, recipe in grouped_samples():
        if None not in (recipe.weight, recipe.weight_for_grad_input):
            yield x, weight, offsets, bias, *flat_sets(sets_of_weight(weight, recipe)), recipe


def _recipes() -> Iterator[Recipe]:
    value, grad = DelayedScaling(history=4), DelayedScaling(format="e5m2", history=4, margin=1)
    own = CurrentScaling()
    every: dict[str, Any] = {"input": value, "weight": value, "grad_output": grad, "weight_for_grad_input": value}
    yield Recipe(**every, grad_output_for_grad_weight=grad, input_for_grad_weight=value)
    yield Recipe(**every)
    yield Recipe(input=value, weight=own, grad_output=own, weight_for_grad_input=own)


def delayed_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::delayed_linear."""
    generator = torch.Generator().manual_seed(0)
    for x in samples.matrices():
        for recipe in _recipes():
            weight = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype)
            state = torch.rand(3, 4, generator=generator), torch.tensor([100.0, 150.0, 1000.0])
            yield x, weight, torch.ones(40, dtype=x.dtype), *state, None, recipe
    yield x, weight, None, *state, None, recipe


def sharded_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::sharded_linear, for a group of one rank."""
    for index, (x, weight, bias, recipe) in enumerate(linear_samples()):
        weight_dim = index % 2
        yield x, weight, bias, weight_dim, [weight.shape[weight_dim]], None, [0], 0, "", recipe


def fsdp_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::fsdp_linear, for one rank, with and without amaxes."""
    for index, (x, weight, bias, recipe) in enumerate(linear_samples()):
        shard = weight.float() if index % 2 else weight
        known = [None, None]
        if index % 3 == 0:
            slots = (recipe.weight, recipe.weight_for_grad_input)
            known = [None if each is None else amax(weight, each) for each in slots]
        yield x, shard, bias, *known, Rows.alone(weight.shape[0]), recipe


def fsdp_delayed_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::fsdp_delayed_linear, for one rank."""
    for x, weight, bias, _, multiplier, _, recipe in delayed_samples():
        tokens = torch.zeros(3), torch.zeros(1)
        yield x, weight.float(), bias, *tokens, None, None, multiplier, Rows.alone(weight.shape[0]), recipe


def grouped_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::grouped_linear."""
    generator = torch.Generator().manual_seed(0)
    for recipe in samples.recipes():
        for offsets in sample_offsets():
            x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((12, 24), (3, 20, 24)))
            x[int(offsets[-1]) :] = torch.nan
            yield x, weight, offsets, torch.ones(3, 20, dtype=x.dtype), recipe
    # here `offsets` is the last of sample_offsets(), whose groups have no rows
    yield x.float(), weight.float().transpose(1, 2).contiguous().transpose(1, 2), offsets, None, recipe
    yield x[:0], weight, offsets, None, recipe
    yield torch.randn(24, 12, generator=generator).t(), weight.float(), offsets + 12, None, recipe


def sharded_grouped_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::sharded_grouped_linear, for a group of one rank."""
    for index, (x, weight, offsets, bias, recipe) in enumerate(grouped_samples()):
        weight_dim = 1 + index % 2
        yield x, weight, offsets, bias, weight_dim, [weight.shape[weight_dim]], 0, "", recipe


def fsdp_grouped_samples() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of fp8compile::fsdp_grouped_linear, for one rank."""
    for index, (x, weight, offsets, bias, recipe) in enumerate(grouped_samples()):
        shard = weight.float() if index % 2 else weight
        yield x, shard, offsets, bias, Rows.alone(weight.shape[0]), recipe
