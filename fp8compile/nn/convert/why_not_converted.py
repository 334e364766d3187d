"""Decide why `convert` leaves a layer in high precision.

The reason is the layer's kind, an argument of the caller, or other code that uses the layer's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8compile._compat import is_sharded_class
from fp8compile.nn.convertible.assign_recipes import Recipes, assigner, ends
from fp8compile.nn.convertible.convertible_layers import is_converted, layers
from fp8compile.nn.convertible.filters import Filter, resolve_filter
from fp8compile.nn.convertible.subclasses import names_taken
from fp8compile.nn.experts.converted_class import cannot_convert_by_spec, cannot_take_by_spec
from fp8compile.nn.experts.routers import routers
from fp8compile.nn.parameter_uses.past_forward import PAST_FORWARD, known_past_forward
from fp8compile.quantizers import CALL, PARAMETER, STEP, Recipe
from fp8compile.tensor import SOURCE_DTYPES, has_codes

__all__ = ["AT_AN_END", "LEFT_OUT", "ROUTER", "cannot_take", "recipes_and_reasons"]

LEFT_OUT = "_fp8compile_left_out"  # attribute of a layer that convert left out: the reason
AT_AN_END = "at one end of the model (keep_ends={})"
ROUTER = "a router: the scores that select experts stay in high precision"


def _cannot_keep_class(module: nn.Linear) -> str | None:
    """Return why a layer of a subclass of ``nn.Linear`` can't be converted; None if it can."""
    cls = type(module)
    subclass = f"a subclass of nn.Linear ({cls.__qualname__})"
    if is_parametrized(module):
        return "its weight or bias is parametrized; convert the model first, then parametrize the converted layer"
    if is_lazy(module.weight):
        return f"{subclass} whose parameters are not initialized; call the model once before convert"
    if is_sharded_class(cls):
        return f"{subclass} that is sharded by fully_shard; convert first"
    if cls.forward is not nn.Linear.forward or cls.__call__ is not nn.Linear.__call__:
        return f"{subclass}, whose own forward would be lost"
    return None


def _cannot_convert_linear(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear and (reason := _cannot_keep_class(module)):
        return reason
    if names := names_taken(module):
        return f"it already has an attribute {names[0]}, which an FP8 layer also uses"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (a hook of another library?) and would be lost"
    is_codes = has_codes(module.weight)
    if is_codes or module.weight.layout != torch.strided:
        kind = type(module.weight).__name__ if is_codes else module.weight.layout
        return f"its weight is {kind}; it must be a dense tensor, which FP8 layers quantize themselves"
    if module.weight.dtype not in SOURCE_DTYPES:
        return f"weights are {module.weight.dtype}; FP8 layers support bfloat16, float16 and float32"
    return None


def _cannot_convert(layer: nn.Module) -> str | None:
    return _cannot_convert_linear(layer) if isinstance(layer, nn.Linear) else cannot_convert_by_spec(layer)


def cannot_take(layer: nn.Module, recipe: Recipe) -> str | None:
    """Return why a layer can't be converted with this recipe; None if it can."""
    return None if isinstance(layer, nn.Linear) else cannot_take_by_spec(layer, recipe)


def _asker(
    model: nn.Module, recipe: Recipes, filter: Filter | None, keep_ends: int, fqns: list[str]
) -> Callable[[nn.Module, list[str]], tuple[Recipe | None, str]]:
    """Make a function (layer, names) -> (recipe, "") or (None, reason) from the arguments of `convert`.

    ``fqns`` are the names of all layers.
    """
    filter_reason, assign, kept = resolve_filter(filter, fqns), assigner(recipe, fqns), ends(model, keep_ends)

    def asked(layer: nn.Module, names: list[str]) -> tuple[Recipe | None, str]:
        # leaving out one of a layer's names leaves out the layer
        left_out = next((reason for fqn in names if (reason := filter_reason(layer, fqn)) is not None), None)
        if left_out is None and layer in kept:
            left_out = AT_AN_END.format(keep_ends)
        if left_out is not None:
            return None, left_out
        own = assign(layer, names)
        return own, "" if own is not None else "no recipe is given for it"

    return asked


def _has_recipe(layer: Any, recipe: Recipe, *, asks_lifetime: bool) -> bool:
    """Whether a converted layer, whose weights may have been replaced since, is what ``recipe`` asks for."""
    held, wanted = layer.recipe.weight_lifetime, recipe.weight_lifetime
    fits = wanted != PARAMETER and held in (wanted, PARAMETER)
    if layer.is_quantized():
        fits = wanted == PARAMETER or (wanted != STEP and not asks_lifetime)
    return fits and layer.recipe.with_lifetime(CALL) == recipe.with_lifetime(CALL)


def recipes_and_reasons(
    model: nn.Module, recipe: Recipes, filter: Filter | None, keep_ends: int, weight_lifetime: str | None = None
) -> tuple[dict[nn.Module, tuple[Recipe | None, str]], dict[nn.Module, Recipe]]:
    """Decide the recipe of each layer that is not converted yet; for the arguments see `convert`.

    Returns {layer: (recipe, "") or (None, reason)}, and {layer: recipe} of those that are converted with it already.

    Raises:
        ValueError: The model has no layers, or a converted layer would get another recipe.
    """
    found = dict(layers(model))
    if not found:
        raise ValueError(f"convert: {type(model).__name__} has no nn.Linear, so there is nothing to convert.")
    asked = _asker(model, recipe, filter, keep_ends, [fqn for names in found.values() for fqn in names])
    past_forward, scoring = known_past_forward(model), routers(model)
    plan: dict[nn.Module, tuple[Recipe | None, str]] = {}
    again: dict[nn.Module, Recipe] = {}
    for layer, names in found.items():
        own, why_not = asked(layer, names)
        if own is not None and weight_lifetime is not None:
            own = own.with_lifetime(weight_lifetime)
        if is_converted(layer):
            if own is not None and not _has_recipe(layer, own, asks_lifetime=weight_lifetime is not None):
                raise ValueError(
                    f"convert: {names[0] or 'the model'} is already converted, with another recipe. Call "
                    "fp8compile.revert(model) first, or exclude it with the filter."
                )
            if own is not None:
                again[layer] = own
            continue
        reason = ROUTER if layer in scoring else _cannot_convert(layer)
        if not reason and layer in past_forward:
            reason = f"{past_forward[layer]} {PAST_FORWARD}, which would not be FP8"
        reason = reason or why_not
        if not reason and own is not None:
            reason = cannot_take(layer, own)
        plan[layer] = (None, reason) if reason else (own, "")
    return plan, again
