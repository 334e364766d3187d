"""Sample arguments of the layer ops for one rank; more ranks need processes (tests/parallel)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from fp8compile.ops.amax import amax
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_sharding import UNSHARDED, OverFsdp, OverGroup
from fp8compile.ops.layer.make_weight_codes import sets_of_weight
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Recipe
from fp8compile.testing.samples import inputs

__all__ = [
    "delayed_samples",
    "grad_input_samples",
    "grad_weight_samples",
    "linear_samples",
    "observe_samples",
    "weight_samples",
]

Sample = tuple[Any, ...]


def _dense() -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for x in inputs.matrices():
        for recipe in inputs.recipes():
            weight = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype)
            yield x, weight, torch.ones(40, dtype=x.dtype), None, [], [], UNSHARDED, recipe
    yield x, weight, None, None, [], [], UNSHARDED, recipe


def _grouped() -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for recipe in inputs.recipes():
        for offs in inputs.offsets_of_groups():
            x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((12, 24), (3, 20, 24)))
            x[int(offs[-1]) :] = torch.nan
            yield x, weight, torch.ones(3, 20, dtype=x.dtype), offs, [], [], UNSHARDED, recipe
    # here `offs` is the last of inputs.offsets_of_groups(), whose groups have no rows
    tail: Sample = ([], [], UNSHARDED, recipe)
    yield x.float(), weight.float().transpose(1, 2).contiguous().transpose(1, 2), None, offs, *tail
    yield x[:0], weight, None, offs, *tail
    yield torch.randn(24, 12, generator=generator).t(), weight.float(), None, offs + 12, *tail


def _with_shared_scale() -> Iterator[Sample]:
    for *operands, _, sizes, sharding, recipe in _dense():
        yield *operands, [*Known(outer_amax=torch.full((1,), 6.0))], sizes, sharding, recipe


def _with_codes(family: Callable[[], Iterator[Sample]]) -> Iterator[Sample]:
    for x, weight, bias, offs, _, sizes, sharding, recipe in family():
        if None not in (recipe.weight, recipe.weight_for_grad_input):
            yield x, weight, bias, offs, Known.sets(*sets_of_weight(weight, recipe)), sizes, sharding, recipe


def _over_group(family: Callable[[], Iterator[Sample]]) -> Iterator[Sample]:
    for index, (x, weight, bias, offs, known, _, _, recipe) in enumerate(family()):
        sharding = OverGroup(weight_dim=index % 2, ranks=1, rank=0, group="")
        yield x, weight, bias, offs, known, [weight.shape[index % 2 - 2]], sharding, recipe


def _over_fsdp(family: Callable[[], Iterator[Sample]]) -> Iterator[Sample]:
    for index, (x, weight, bias, offs, known, sizes, _, recipe) in enumerate(family()):
        shard = weight.float() if index % 2 else weight
        if index % 3 == 0 and offs is None:
            quantizers = recipe.weight, recipe.weight_for_grad_input
            sets = (Known(amax=None if each is None else amax(weight, each)) for each in quantizers)
            known = [*chain.from_iterable(sets)]
        yield x, shard, bias, offs, known, sizes, OverFsdp(Rows.alone(weight.shape[0])), recipe


FAMILIES: tuple[Callable[[], Iterator[Sample]], ...] = (
    _dense,
    _with_shared_scale,
    lambda: _with_codes(_dense),
    lambda: _over_group(_dense),
    lambda: _over_fsdp(_dense),
    _grouped,
    lambda: _with_codes(_grouped),
    lambda: _over_group(_grouped),
    lambda: _over_fsdp(_grouped),
)


def weight_samples() -> Iterator[tuple[torch.Tensor, Recipe]]:
    """Yield weights of dense layers, each with a recipe."""
    for _, weight, *_, recipe in _dense():
        yield weight, recipe


def linear_samples() -> Iterator[Sample]:
    """Yield sample arguments of fp8compile::linear."""
    for family in FAMILIES:
        yield from family()


def _recipes() -> Iterator[Recipe]:
    value, grad = DelayedScaling(history=4), DelayedScaling(format="e5m2", history=4, margin=1)
    own = CurrentScaling()
    every: dict[str, Any] = {"input": value, "weight": value, "grad_output": grad, "weight_for_grad_input": value}
    yield Recipe(**every, grad_output_for_grad_weight=grad, input_for_grad_weight=value)
    yield Recipe(**every)
    yield Recipe(input=value, weight=own, grad_output=own, weight_for_grad_input=own)


def _with_multiplier() -> Iterator[Sample]:
    """Yield what a layer with delayed scaling passes to the ops of its gradients, by the arguments of `linear`."""
    generator = torch.Generator().manual_seed(0)
    for x in inputs.matrices():
        for recipe in _recipes():
            weight, known = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype), _multiplier()
            yield x, weight, torch.ones(40, dtype=x.dtype), None, known, [], UNSHARDED, recipe
    yield x, weight, None, None, known, [], UNSHARDED, recipe


def _multiplier() -> list[Any]:
    return [*Known(multiplier=torch.tensor([100.0, 150.0, 1000.0]))]


def delayed_samples() -> Iterator[Sample]:
    """Yield sample arguments of fp8compile::delayed_linear: state in place, then the carriers of FSDP."""
    generator = torch.Generator().manual_seed(1)
    for x, weight, bias, offs, known, sizes, _, recipe in _with_multiplier():
        state: Sample = None, None, torch.rand(3, 4, generator=generator), Known(*known).multiplier, None
        yield x, weight, bias, *state, offs, [], sizes, UNSHARDED, recipe
    for x, weight, bias, offs, known, sizes, _, recipe in _with_multiplier():
        state = torch.zeros(3), torch.zeros(1), None, Known(*known).multiplier, None
        yield x, weight.float(), bias, *state, offs, [], sizes, OverFsdp(Rows.alone(weight.shape[0])), recipe


def _with_gradient(family: Callable[[], Iterator[Sample]]) -> Iterator[tuple[Any, Sample]]:
    """Yield samples of `linear`, each with a grad_output that is not contiguous."""
    for sample in family():
        x, weight, _, *tail = sample
        args, generator = LayerArgs.of(*tail), torch.Generator().manual_seed(1)
        sharding = args.sharding
        tokens = sharding.tokens(x.shape[:-1], args.sizes, all_ranks=sharding.shards_out_features())
        grad = torch.randn((sharding.out_features(weight.shape, args.offs), *tokens), generator=generator)
        yield grad.to(x.dtype).movedim(0, -1), sample


def grad_input_samples() -> Iterator[Sample]:
    """Yield sample arguments of fp8compile::grad_input."""
    for family in (*FAMILIES, _with_multiplier):
        for grad, (_, weight, _, offs, known, *rest) in _with_gradient(family):
            yield grad, weight, offs, Known.last_set(known), *rest


def grad_weight_samples() -> Iterator[Sample]:
    """Yield sample arguments of fp8compile::grad_weight."""
    for family in (*FAMILIES, _with_multiplier):
        for grad, (x, weight, _, offs, known, *rest) in _with_gradient(family):
            multiplier = Known.first_set(known).multiplier
            yield grad, x, weight.dtype, offs, [] if multiplier is None else _multiplier(), *rest


def observe_samples() -> Iterator[tuple[Any, ...]]:
    """Yield grad_output and the arguments of `linear`; of each family one with tokens, and one without."""
    for family in (*FAMILIES, _with_multiplier):
        seen = set()
        for grad, sample in _with_gradient(family):
            if (is_empty := sample[0].numel() == 0) not in seen and Known.first_set(sample[4]).codes is None:
                seen.add(is_empty)
                yield grad, sample
