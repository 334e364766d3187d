"""advise: measures each layer's GEMMs in several recipes on user data; picks recipes by a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8compile import recipes as ready
from fp8compile.nn.convert.why_not_converted import cannot_take, recipes_and_reasons
from fp8compile.nn.convertible.convertible_layers import is_converted, layers, matrices, weight_slots
from fp8compile.nn.convertible.filters import Filter
from fp8compile.nn.experts.known_modules import is_experts
from fp8compile.nn.layer.functional import check_recipe
from fp8compile.quantizers import Recipe
from fp8compile.testing.explain.roofline import PEAKS, Peaks
from fp8compile.testing.gpu.gpus import GPUS, Gpu
from fp8compile.testing.numerics.advice import HIGH_PRECISION, Advice, LayerAdvice, least_of
from fp8compile.testing.numerics.layer_calls import LayerCall, record_calls
from fp8compile.testing.numerics.model_calls import Loss, arguments_of, check_eager, check_whole
from fp8compile.testing.numerics.product_costs import Cost, cost_of, why_not_native
from fp8compile.testing.numerics.product_errors import Errors, exact_products, product_errors

__all__ = ["advise", "advise_call"]

# Bell-shaped values in nvfp4 give products of 15 to 17 dB; a layer with less has a distribution that costs it bits.
BUDGET = {"sqnr": 14.0}
SAMPLE = 512
GIVEN = "names such as 'nvfp4' or recipes, or a mapping from names to recipes"


# ---------------------------------------------------------------------------------- arguments


def _by_name(recipes: Iterable[str | Recipe] | Mapping[str, Recipe] | None, gpu: Gpu) -> dict[str, Recipe]:
    """Return the candidate recipes by name; by default the ready ones that ``gpu`` runs natively.

    Recipes with delayed scaling are left out by default.
    """
    if recipes is None:
        found = {name: ready.by_name(name) for name in ready.names()}
        return {
            name: recipe
            for name, recipe in found.items()
            if not recipe.history() and why_not_native(recipe, gpu, torch.bfloat16, grouped=False) is None
        }
    if isinstance(recipes, (str, Recipe)) or not isinstance(recipes, Iterable):
        raise TypeError(f"advise: `recipes` is {recipes!r}; it must be a list or tuple of {GIVEN}.")
    if isinstance(recipes, Mapping):
        named = dict(recipes)
    else:
        both = [(each, ready.by_name(each)) if isinstance(each, str) else (None, each) for each in recipes]
        named = {}
        for name, recipe in both:
            check_recipe("advise", recipe)
            name = name or ready.describe(recipe)
            named[name if name not in named else f"{name} {len(named)}"] = recipe
    for name, recipe in named.items():
        check_recipe(f"advise: {name!r}", recipe)
    if not named or HIGH_PRECISION in named:
        raise ValueError(
            f"advise: `recipes` is {list(named)}; it must contain at least one recipe, and no recipe may be named "
            f"{HIGH_PRECISION!r}."
        )
    return named


def _check_budget(budget: Mapping[str, float]) -> None:
    kinds = ("sqnr", "time")
    is_one = isinstance(budget, Mapping) and len(budget) == 1 and next(iter(budget)) in kinds
    value = next(iter(budget.values())) if is_one else None
    if not is_one or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(
            f"advise: `budget` is {budget!r}; it must be {{'sqnr': dB}}, the minimum for every GEMM of a layer, or "
            "{'time': share}, the allowed fraction of the minimum time without FP8 for all layers together."
        )


def _peaks(gpu: str) -> tuple[Gpu, Peaks]:
    if gpu not in PEAKS:
        raise ValueError(f"advise: `gpu` is {gpu!r}; it must be one of {', '.join(PEAKS)}.")
    return GPUS[gpu], PEAKS[gpu]


# ---------------------------------------------------------------------------------- one layer


def _worst(errors: Sequence[Errors]) -> Errors:
    found: list[float | None] = []
    for each in zip(*errors, strict=True):
        known = tuple(value for value in each if value is not None)
        found.append(least_of(known) if known else None)
    return tuple(found)


def _refusals(layer: nn.Module, recipes: Mapping[str, Recipe], gpu: Gpu) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts by recipe: why the layer can't take it; or else why the GPU can't run it natively."""
    owner, name = weight_slots(layer)[0]
    dtype = getattr(owner, name).dtype
    by_layer: dict[str, str] = {}
    by_gpu: dict[str, str] = {}
    for each, recipe in recipes.items():
        if (reason := cannot_take(layer, recipe)) is not None:
            by_layer[each] = reason
        elif (reason := why_not_native(recipe, gpu, dtype, grouped=is_experts(layer))) is not None:
            by_gpu[each] = reason
    return by_layer, by_gpu


def _measured(
    name: str,
    layer: nn.Module,
    calls: Sequence[LayerCall],
    recipes: Mapping[str, Recipe],
    gpu: Gpu,
    peaks: Peaks,
    rows_factor: float,
) -> LayerAdvice:
    by_layer, by_gpu = _refusals(layer, recipes, gpu)
    tried: dict[str, Recipe | None] = {key: recipe for key, recipe in recipes.items() if key not in by_layer}
    tried[HIGH_PRECISION] = None
    found: dict[str, list[Errors]] = {key: [] for key in tried}
    costs = dict.fromkeys(tried, Cost(0, 0))
    for call in calls:
        exact = exact_products(call)
        for key, recipe in tried.items():
            found[key].append(product_errors(call, recipe, exact))
            costs[key] += cost_of(call, recipe, peaks, rows_factor=rows_factor)
    grouped = [call for call in calls if call.ends is not None]
    groups = None
    if grouped:
        groups = max(call.filled for call in grouped), grouped[0].weight.shape[0]
    return LayerAdvice(
        name=name,
        matrices=tuple(matrices(layer)),
        rows=sum(call.rows for call in calls),
        sampled=sum(call.x.shape[0] for call in calls),
        groups=groups,
        errors={key: _worst(each) for key, each in found.items()},
        costs=costs,
        refused={**by_layer, **by_gpu},
    )


# ---------------------------------------------------------------------------------- the budget


def _fastest(layer: LayerAdvice, least: float) -> LayerAdvice:
    """Return a layer's advice: the fastest recipe whose GEMMs all have ``least`` dB, or "unconverted" if faster."""
    allowed = [name for name in layer.allowed() if name == HIGH_PRECISION or least_of(layer.errors[name]) >= least]
    return replace(layer, takes=min(allowed, key=lambda name: (layer.costs[name].seconds, _noise(layer, name))))


def _noise(layer: LayerAdvice, name: str) -> float:
    errors = [each for each in layer.errors[name] if each is not None]
    return math.inf if any(map(math.isnan, errors)) else sum(10 ** (-each / 10) for each in errors)


def _within(found: Sequence[LayerAdvice], share: float) -> list[LayerAdvice]:
    """Pick recipes with little noise whose time together is at most ``share`` of the time without FP8.

    The search is greedy: it starts from the fastest recipes, and each step takes the change of one layer's recipe
    that saves the most noise for the time that it adds.
    """
    limit = share * sum(layer.costs[HIGH_PRECISION].seconds for layer in found)
    taken = [_fastest(layer, -math.inf) for layer in found]
    spent = sum(layer.costs[layer.takes].seconds for layer in taken)
    if spent > limit:
        raise ValueError(
            f"advise: `budget` is {{'time': {share:g}}}, but the fastest recipes take {spent / limit * share:.3f} "
            "of the minimum time without FP8. Increase the budget, or pass faster recipes."
        )
    while True:
        gains: list[tuple[float, int, str, float]] = []
        for place, layer in enumerate(taken):
            for name in layer.allowed():
                more = layer.costs[name].seconds - layer.costs[layer.takes].seconds
                less = _noise(layer, layer.takes) - _noise(layer, name)
                if less > 0 and spent + more <= limit:
                    gains.append((less / more if more > 0 else math.inf, place, name, more))
        if not gains:
            return taken
        _, place, name, more = max(gains, key=lambda gain: gain[0])
        taken[place] = replace(taken[place], takes=name)
        spent += more


# ---------------------------------------------------------------------------------- the function


def advise_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recipes: Iterable[str | Recipe] | Mapping[str, Recipe] | None = None,
    budget: Mapping[str, float] | None = None,
    loss: Loss | None = None,
    filter: Filter | None = None,
    gpu: str = "h200",
    rows_factor: float = 1,
    sample: int = SAMPLE,
) -> Advice:
    """Advise as `advise` does with these options, for a call with positional and keyword arguments."""
    check_eager("advise", model)
    budget = BUDGET if budget is None else budget
    _check_budget(budget)
    if sample < 1 or rows_factor <= 0:
        raise ValueError(
            f"advise: `sample` is {sample} and `rows_factor` is {rows_factor}; `sample` must be an int of at least 1, "
            "and `rows_factor` a number above 0."
        )
    pretended, peaks = _peaks(gpu)
    candidates = _by_name(recipes, pretended)
    names = {layer: each[0] for layer, each in layers(model)}
    if converted := [name for layer, name in names.items() if is_converted(layer)]:
        raise ValueError(
            f"advise: {converted[0]!r} is already converted, but errors are measured against the model without FP8. "
            "Call fp8compile.revert(model) first."
        )
    plan, _ = recipes_and_reasons(model, ready.rowwise(), filter, 0)
    left_out = {names[layer]: reason for layer, (_, reason) in plan.items() if reason}
    wanted = {names[layer]: layer for layer, (_, reason) in plan.items() if not reason}
    check_whole("advise", wanted.items())
    calls = record_calls(model, args, kwargs, wanted, loss=loss, sample=sample)
    left_out |= dict.fromkeys((name for name in wanted if name not in calls), "the model did not call it")
    found = [
        _measured(name, layer, calls.pop(name), candidates, pretended, peaks, rows_factor)
        for name, layer in wanted.items()
        if name in calls
    ]
    if not found:
        reasons = "; ".join(sorted(set(left_out.values())))
        raise ValueError(
            f"advise: no layer can be measured, because {reasons}. Pass a model with nn.Linear layers that its "
            "forward calls, and a filter that does not exclude all of them."
        )
    (kind, value), *_ = budget.items()
    taken = [_fastest(layer, value) for layer in found] if kind == "sqnr" else _within(found, value)
    return Advice(
        layers=tuple(taken), recipes=candidates, budget=dict(budget), gpu=peaks.name, rows_factor=rows_factor,
        left_out=left_out,
    )  # fmt: skip


def advise(
    model: nn.Module,
    batch: Any,
    *,
    recipes: Iterable[str | Recipe] | Mapping[str, Recipe] | None = None,
    budget: Mapping[str, float] | None = None,
    loss: Loss | None = None,
    filter: Filter | None = None,
    gpu: str = "h200",
    rows_factor: float = 1,
    sample: int = SAMPLE,
) -> Advice:
    """Recommend a recipe for each layer of a model, based on the errors of its GEMMs on your data.

    The model runs once, forward and backward, in high precision. For each layer that `convert` would convert,
    including experts, the three GEMMs are then computed in each recipe and in float64 on a sample of the rows. The
    model's classes, gradients, buffers and modes, and random states, are restored afterwards.

    Args:
        model: A model that is not sharded, converted or compiled.
        batch: The model's arguments: a mapping is passed as keyword arguments, a tuple or list as positional
            arguments, anything else as the only argument.
        recipes: The candidates: names, recipes, or a mapping from names to recipes. By default, the built-in recipes
            that the GPU supports natively, without delayed scaling.
        budget: ``{"sqnr": dB}`` gives each layer the fastest recipe whose GEMMs all have this signal-to-noise ratio.
            ``{"time": share}`` minimizes the noise of recipes whose total time is at most this fraction of the minimum
            time without FP8. The default is 14 dB, slightly below the result of nvfp4 for bell-shaped values.
        loss: A function of the model's output that returns the scalar for the backward. None uses the output itself,
            its ``loss``, or its first entry.
        filter: The layers to consider. Pass the same filter to `fp8compile.convert`.
        gpu: The GPU whose peak rates determine the minimum times, a key of ``fp8compile.testing.explain.PEAKS``.
            Recipes without GEMMs on this GPU are shown, but never recommended.
        rows_factor: Factor by which the rows of the batch are multiplied for bytes and times, if training batches are
            larger than ``batch``. With few rows, casts of weights take more time than FP8 saves.
        sample: Number of rows per layer on which errors are measured, in runs of consecutive rows.

    Returns:
        The advice. Pass it to `fp8compile.convert` as ``recipe``; it prints as a table.

    Raises:
        TypeError: The model is not a module, is compiled, or is sharded; there is no scalar loss; ``recipes`` is a
            single recipe or name.
        ValueError: The model is already converted, or no layer can be measured. The recipe or GPU is unknown. The
            budget is malformed, or even the fastest recipes exceed it.
    """
    args, kwargs = arguments_of(batch)
    return advise_call(
        model, args, kwargs, recipes=recipes, budget=budget, loss=loss, filter=filter, gpu=gpu,
        rows_factor=rows_factor, sample=sample,
    )  # fmt: skip
