"""The error of a layer's three GEMMs in a recipe, relative to float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fp8compile.nn import DelayedState, grouped_linear, linear
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.testing.numerics.decibels import sqnr
from fp8compile.testing.numerics.layer_calls import LayerCall

__all__ = ["Errors", "exact_products", "product_errors"]

# the ratio of output, grad_input and grad_weight in dB; None for a product that the backward does not compute
Errors = tuple[float | None, ...]


def _spans(ends: Tensor | None, rows: int) -> list[tuple[int, int]]:
    if ends is None:
        return [(0, rows)]
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def exact_products(call: LayerCall) -> list[Tensor | None]:
    """Output, grad_input and grad_weight of a call's sampled rows in float64; None for skipped gradients."""
    x, weight = call.x.double(), call.weight.double()
    stack = weight if call.ends is not None else weight.unsqueeze(0)
    spans = _spans(call.ends, x.shape[0])
    found: list[Tensor | None] = [torch.cat([x[a:b] @ w.t() for (a, b), w in zip(spans, stack, strict=True)])]
    if call.grad_output is None:
        return [*found, None, None]
    dy = call.grad_output.double()
    grad_x = torch.cat([dy[a:b] @ w for (a, b), w in zip(spans, stack, strict=True)]) if call.needs_x else None
    grad_w = torch.stack([dy[a:b].t() @ x[a:b] for a, b in spans]).view_as(weight) if call.needs_weight else None
    return [*found, grad_x, grad_w]


def _output(call: LayerCall, x: Tensor, weight: Tensor, recipe: Recipe | None, state: DelayedState | None) -> Tensor:
    if call.ends is not None:
        if recipe is not None:
            return grouped_linear(x, weight, call.ends, recipe=recipe)
        spans = _spans(call.ends, x.shape[0])
        return torch.cat([functional.linear(x[a:b], w) for (a, b), w in zip(spans, weight, strict=True)])
    return functional.linear(x, weight) if recipe is None else linear(x, weight, recipe=recipe, state=state)


def _products(call: LayerCall, recipe: Recipe | None, state: DelayedState | None) -> list[Tensor | None]:
    x = call.x.clone().requires_grad_(call.needs_x)
    weight = call.weight.detach().requires_grad_(call.needs_weight)
    with torch.enable_grad():
        y = _output(call, x, weight, recipe, state)
    found: list[Tensor | None] = [y.detach(), None, None]
    if call.grad_output is not None:
        places = [place for place, needed in ((1, call.needs_x), (2, call.needs_weight)) if needed]
        given = [(x, weight)[place - 1] for place in places]
        for place, grad in zip(places, torch.autograd.grad(y, given, call.grad_output) if given else (), strict=True):
            found[place] = grad
    return found


def product_errors(call: LayerCall, recipe: Recipe | None, exact: Sequence[Tensor | None]) -> Errors:
    """Signal-to-noise ratio in dB of each of a layer's GEMMs, in the order of `GEMMS`.

    A device without GEMMs for the recipe emulates them. A recipe with delayed scaling uses the amaxes of the same
    rows, as if the previous step had seen the same data.

    Args:
        call: The operands.
        recipe: The recipe; None for the operands' own dtype.
        exact: The result of `exact_products` for the call.
    """
    state = None
    if recipe is not None:
        recipe = replace(recipe, emulate=True)
        if recipe.history():
            state = DelayedState.initial(recipe, device=call.x.device)
            _products(call, recipe, state)
    found = _products(call, recipe, state)
    assert len(found) == len(GEMMS)
    return tuple(
        None if got is None or want is None or not want.any() else sqnr(got, want)
        for got, want in zip(found, exact, strict=True)
    )
