"""Replace the weights of converted layers by codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fp8compile._compat import allow_group_in_subclass, is_dtensor, is_fsdp, local_itself
from fp8compile.nn.convertible_layers import weight_names
from fp8compile.nn.experts.known_modules import as_it_lies, holds_no_stacks
from fp8compile.nn.linear import Linear
from fp8compile.nn.parameter_uses.owners import users_of_parameters
from fp8compile.nn.tensor_parallel_weights import not_placed, quantized_part, unwritten
from fp8compile.quantizers import DelayedScaling, Quantizer, Recipe
from fp8compile.tensor import QuantizedParameter, assign, in_place_of

__all__ = ["as_parameter", "check_weights", "not_codes", "put_codes", "quantize_weights", "quantizers_of_sets"]


CONVERT = "convert: quantized_parameters"


def _check_placed(function: str, names: Mapping[nn.Module, str], layers: Iterable[nn.Module]) -> None:
    if not any(is_dtensor(attrgetter(name)(layer)) for layer in layers for name in weight_names(layer)):
        return
    allow_group_in_subclass()
    if sharded := [name or "the model" for module, name in names.items() if is_fsdp(module)]:
        raise ValueError(f"{function}, and fully_shard was called for {', '.join(sharded)}. Do this before that.")


def _slots(recipe: Recipe) -> tuple[Quantizer | None, ...]:
    return recipe.weight, recipe.weight_for_grad_input


def not_codes(recipe: Recipe) -> str | None:
    """Return why weights can't be kept as codes with this recipe; None if they can."""
    if recipe.shares_weight_codes():
        return None
    if recipe.delayed()[1] is not None:
        return "has delayed scaling for one product of the weight, and not for the other"
    if None in _slots(recipe):
        return "leaves a product of the weight in high precision, which needs its values"
    if not all(quantizer.is_local() for quantizer in _slots(recipe) if quantizer is not None):
        return "makes codes that depend on where in the tensor a value stands, and differ between its two products"
    return None


def _sets_as_it_lies(layer: nn.Module, recipe: Recipe) -> tuple[Quantizer, ...]:
    slots: tuple[Any, ...] = _slots(recipe)[:1] if recipe.shares_weight_codes() else _slots(recipe)
    return tuple(as_it_lies(layer, each) for each in slots)


def _codes(layer: Any, weight: Tensor, outer_amax: Tensor | None) -> Tensor:
    sets = _sets_as_it_lies(layer, layer.recipe)
    if weight.ndim == 3:
        return QuantizedParameter.of(weight, *sets, batch=1)
    if isinstance(layer.recipe.weight, DelayedScaling):
        return unwritten(weight, layer.recipe.weight)
    if is_dtensor(weight):
        return quantized_part(weight, sets, outer_amax)
    return QuantizedParameter.of(weight, *sets, outer_amax=outer_amax)


def _shared_amax(layer: nn.Module) -> Tensor | None:
    """Return the amax over all weights that share the layer's outer scale, (1,) float32; None if none do."""
    amax = layer.outer_amax() if isinstance(layer, Linear) else None
    return None if amax is None else local_itself(amax)


def _group(layer: nn.Module) -> set[int]:
    """Return the ids of the weights with which a layer's weight shares an outer scale."""
    return {id(each.weight) for each in getattr(layer, "scale_group", ())}


def _check_shared(
    function: str,
    names: Mapping[nn.Module, str],
    recipes: Mapping[nn.Module, Recipe],
    module: nn.Module,
    weight: Tensor,
    users: Sequence[nn.Module],
) -> None:
    """Raise a ValueError unless all ``users`` of a weight need the same codes as ``module``."""
    name, recipe = names[module] or "the model", recipes[module]
    others = [names[each] for each in users if each not in recipes]
    if others:
        raise ValueError(
            f"{function}, and the weight of {name} is also that of {', '.join(others)}, which "
            "needs its values. Leave that layer out by the filter."
        )
    if len(users) > 1 and weight.ndim == 3:
        raise ValueError(
            f"{function}, and {', '.join(names[each] for each in users)} have the "
            "weights of experts in common. Leave them out by the filter."
        )
    if len(users) > 1 and isinstance(recipe.weight, DelayedScaling):
        raise ValueError(
            f"{function}, and several layers share the weight of {name}, each of which has a "
            "state of delayed scaling of its own. Leave them out by the filter, or take another recipe."
        )
    first = users[0]
    if _slots(recipe) != _slots(recipes[first]):
        raise ValueError(f"{function}, and {name} shares its weight with a layer of another recipe.")
    if _sets_as_it_lies(module, recipe) != _sets_as_it_lies(first, recipe):
        raise ValueError(
            f"{function}, and {name} shares its weight with {names[first]}, of which one keeps it "
            "as (in_features, out_features) and one as (out_features, in_features), so that their codes differ. Leave "
            "both out by the filter, or take a recipe whose codes don't, such as fp8compile.recipes.tensorwise()."
        )
    if _group(module) != _group(first):
        raise ValueError(
            f"{function}, and {name} shares its weight with {names[first]}, and the two share outer scales with "
            "different layers, so that their codes differ. Convert without share_outer_scale."
        )


def check_weights(model: nn.Module, recipes: Mapping[nn.Module, Recipe], *, function: str = CONVERT) -> None:
    """Raise a ValueError unless the weights of all layers in ``recipes`` can be kept as codes.

    ``recipes`` has each layer's recipe. ``function`` is the beginning of the error's text.
    """
    names = {module: name for name, module in model.named_modules()}
    _check_placed(function, names, recipes)
    users = users_of_parameters(model)
    for layer in recipes:
        if (reason := holds_no_stacks(layer)) is not None:
            name = names[layer] or "the model"
            raise ValueError(f"{function}, and {name} {reason}. Leave it out by the filter.")
    for module, weight_name in [(layer, each) for layer in recipes for each in weight_names(layer)]:
        name, recipe, weight = names[module] or "the model", recipes[module], getattr(module, weight_name)
        if (reason := not_codes(recipe)) is not None:
            raise ValueError(
                f"{function}, and the recipe of {name} {reason}. Take another recipe, such as "
                "fp8compile.recipes.rowwise(), mxfp8() or tensorwise(), or leave quantized_parameters out."
            )
        if is_dtensor(weight) and weight.ndim == 3:
            raise ValueError(
                f"{function}, and {weight_name} of {name} is spread over ranks already. Convert "
                "first, then spread the experts by fp8compile.parallel.ExpertParallel, or fully_shard."
            )
        if is_dtensor(weight) and (reason := not_placed(weight, _sets_as_it_lies(module, recipe))) is not None:
            raise ValueError(f"{function}, and the weight of {name} {reason}. Leave that layer out by the filter.")
        _check_shared(function, names, recipes, module, weight, users[weight])


def quantizers_of_sets(layer: Any) -> tuple[Quantizer, ...]:
    """Return the quantizers of a layer's weights: one, or two if grad_input reads separate codes.

    The quantizers are transposed if the layer stores its weights transposed.

    Raises:
        ValueError: The weight can't be kept as codes; the text says why.
    """
    if (reason := not_codes(layer.recipe)) is not None:
        raise ValueError(reason)
    return _sets_as_it_lies(layer, layer.recipe)


def as_parameter(weight: Tensor, name: str, codes: Tensor) -> nn.Parameter:
    """Make a parameter of ``codes`` that can replace ``weight``, the parameter ``name`` of a converted layer."""
    made = in_place_of(weight, codes)
    if (policy := local_itself(made).gathers) is not None:
        policy.name = name
    return made


def put_codes(layer: Any, name: str, codes: nn.Parameter) -> None:
    """Replace the parameter ``name`` of a converted layer by the result of `as_parameter`."""
    setattr(layer, name, codes)
    layer.reach_codes()


def quantize_weights(layers: Iterable[Any], *, keep_initial: bool) -> None:
    """Replace the weights of layers by codes and scales; shared weights stay shared.

    Call `check_weights` first. With ``keep_initial``, a weight also keeps the values before quantization. Weights that
    share an outer scale keep sharing it.
    """
    made: dict[Tensor, nn.Parameter] = {}
    layers = list(layers)
    outer_amaxes = {layer: _shared_amax(layer) for layer in layers}  # before any of the weights is replaced
    for layer, name in [(each, name) for each in layers for name in weight_names(each)]:
        weight = getattr(layer, name)
        if weight not in made:
            made[weight] = as_parameter(weight, name, _codes(layer, weight.detach(), outer_amaxes[layer]))
            if keep_initial:
                local_itself(made[weight]).initial = local_itself(weight).detach()
        put_codes(layer, name, made[weight])
        if isinstance(layer.recipe.weight, DelayedScaling):
            layer.own_weight()
            assign([local_itself(layer.weight)], [local_itself(weight).detach()])
