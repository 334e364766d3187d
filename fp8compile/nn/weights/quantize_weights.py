"""Replace the weights of converted layers by codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile._compat import (
    is_dtensor,
    is_fsdp,
    is_part_of_flat_parameter,
    local_itself,
)
from fp8compile.nn.convertible.convertible_layers import weight_names
from fp8compile.nn.experts.known_modules import as_it_lies, holds_no_stacks
from fp8compile.nn.layer.linear import Linear
from fp8compile.nn.layer.tensor_parallel_weights import not_placed, quantized_part, unwritten
from fp8compile.nn.parameter_uses.owners import users_of_parameters
from fp8compile.quantizers import PARAMETER, DelayedScaling, Quantizer, Recipe
from fp8compile.tensor import QuantizedParameter, allow_groups, assign, in_place_of, mark_replaced

__all__ = [
    "COMPUTED",
    "CONVERT",
    "as_parameter",
    "check_weights",
    "has_computed_weight",
    "makes_parameters",
    "not_codes",
    "put_codes",
    "quantize_weights",
    "quantizers_of_sets",
]


CONVERT = f"convert: weight_lifetime={PARAMETER!r}"
COMPUTED = "the weight is computed from other parameters in each forward (as by weight_norm, spectral_norm or FSDP1)"


def _check_placed(function: str, names: Mapping[nn.Module, str], layers: Iterable[nn.Module]) -> None:
    if not any(is_dtensor(attrgetter(name)(layer)) for layer in layers for name in weight_names(layer)):
        return
    allow_groups()
    if sharded := [name or "the model" for module, name in names.items() if is_fsdp(module)]:
        raise ValueError(
            f"{function}: weights must be quantized before fully_shard, which was already called for "
            f"{', '.join(sharded)}. Quantize first, then call fully_shard."
        )


def makes_parameters(recipe: Recipe | None) -> bool:
    """Whether layers with this recipe have FP8 parameters."""
    return recipe is not None and recipe.weight_lifetime == PARAMETER


def has_computed_weight(layer: nn.Module) -> bool:
    """Whether a weight of a layer is computed from other parameters, such as a view of FSDP1's flat parameter."""
    return not all(_is_own_parameter(attrgetter(name)(layer)) for name in weight_names(layer))


def _is_own_parameter(weight: Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and not is_part_of_flat_parameter(weight)


def _check_gradient_hooks(function: str, name: str, weight: Tensor) -> None:
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"{function}: the weight of {name} has gradient hooks, which an FP8 parameter would lose. Remove them, "
            "and register them on the new parameter."
        )


def _quantizers(recipe: Recipe) -> tuple[Quantizer | None, ...]:
    return recipe.weight, recipe.weight_for_grad_input


def not_codes(recipe: Recipe) -> str | None:
    """Return why weights can't be kept as codes with this recipe; None if they can."""
    if recipe.shares_weight_codes():
        return None
    if recipe.delayed()[1] is not None:
        return "uses delayed scaling for only one of the two GEMMs that read the weight"
    if None in _quantizers(recipe):
        return "leaves a GEMM of the weight in high precision, which needs the original values"
    if not all(quantizer.is_local() for quantizer in _quantizers(recipe) if quantizer is not None):
        return "quantizes the weight differently for its two GEMMs, depending on the position of a value in the tensor"
    return None


def _sets_as_it_lies(layer: nn.Module, recipe: Recipe) -> tuple[Quantizer, ...]:
    read: tuple[Any, ...] = _quantizers(recipe)[:1] if recipe.shares_weight_codes() else _quantizers(recipe)
    return tuple(as_it_lies(layer, each) for each in read)


def _codes(layer: Any, weight: Tensor, outer_amax: Tensor | None) -> Tensor:
    sets = _sets_as_it_lies(layer, layer.recipe)
    if weight.ndim == 3:
        return QuantizedParameter.of(weight, *sets, batch=1)
    if isinstance(layer.recipe.weight, DelayedScaling):
        return unwritten(weight, layer.recipe.weight)
    if is_dtensor(weight):
        return quantized_part(weight, sets, outer_amax)
    return QuantizedParameter.of(weight, *sets, outer_amax=outer_amax)


def _amax_of_group(layer: nn.Module, dtype: torch.dtype | None) -> Tensor | None:
    """Return the amax over all weights that share the layer's outer scale, (1,) float32; None if none do.

    Values are cast to ``dtype`` first, unless it is None.
    """
    amax = layer.outer_amax() if isinstance(layer, Linear) else None
    if amax is not None and dtype is not None:  # rounding keeps the order of magnitudes
        amax = amax.to(dtype).float()
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
            f"{function}: the weight of {name} is shared with {', '.join(others)}, which needs the original values. "
            f"Exclude {name} with the filter, such as filter='!{name}'."
        )
    if len(users) > 1 and weight.ndim == 3:
        raise ValueError(
            f"{function}: {' and '.join(names[each] for each in users)} use the same expert weights, but quantized "
            "parameters of experts can't be shared between modules. Exclude these modules with the filter of "
            "fp8compile.convert, such as filter='!layers.0.experts'."
        )
    if len(users) > 1 and isinstance(recipe.weight, DelayedScaling):
        raise ValueError(
            f"{function}: several layers share the weight of {name}, but each has its own state of delayed scaling. "
            "Exclude them with the filter, or use another recipe."
        )
    first = users[0]
    if _quantizers(recipe) != _quantizers(recipes[first]):
        raise ValueError(
            f"{function}: {name} shares its weight with a layer that has a different recipe. Use one recipe for both "
            "layers."
        )
    if _sets_as_it_lies(module, recipe) != _sets_as_it_lies(first, recipe):
        raise ValueError(
            f"{function}: {name} shares its weight with {names[first]}, but one stores it as (in_features, "
            "out_features) and the other as (out_features, in_features), so their quantized data differ. Exclude both "
            "with the filter, or use a recipe that quantizes both alike, such as fp8compile.recipes.tensorwise()."
        )
    if _group(module) != _group(first):
        raise ValueError(
            f"{function}: {name} shares its weight with {names[first]}, but the two share global scales with "
            "different layers, so their quantized data differ. Convert without share_outer_scale."
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
            raise ValueError(f"{function}: {name} {reason}. Exclude it with the filter, such as filter='!{name}'.")
    for module, weight_name in [(layer, each) for layer in recipes for each in weight_names(layer)]:
        name, recipe, weight = names[module] or "the model", recipes[module], getattr(module, weight_name)
        if not _is_own_parameter(weight):
            raise ValueError(f"{function}: {name} can't be converted: {COMPUTED}. Exclude it with filter='!{name}'.")
        _check_gradient_hooks(function, name, weight)
        if (reason := not_codes(recipe)) is not None:
            raise ValueError(
                f"{function}: the recipe of {name} {reason}. Use another recipe, such as "
                "fp8compile.recipes.rowwise(), mxfp8() or tensorwise(), or weight_lifetime='call'."
            )
        if is_dtensor(weight) and weight.ndim == 3:
            raise ValueError(
                f"{function}: {weight_name} of {name} is already sharded over ranks. Convert first, then shard the "
                "experts with fp8compile.parallel.ExpertParallel or fully_shard."
            )
        if is_dtensor(weight) and (reason := not_placed(weight, _sets_as_it_lies(module, recipe))) is not None:
            raise ValueError(f"{function}: the weight of {name} {reason}. Exclude it with filter='!{name}'.")
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


def as_parameter(weight: Tensor, name: str, codes: Tensor, *, function: str) -> nn.Parameter:
    """Make a parameter of ``codes`` that replaces ``weight``, the parameter ``name`` of a converted layer.

    Optimizers that have ``weight`` raise in their next step; ``function`` is who replaced it, for the error's text.
    """
    made = in_place_of(weight, codes)
    mark_replaced(weight, function)
    if (policy := local_itself(made).gathers) is not None:
        policy.name = name
    return made


def put_codes(layer: Any, name: str, codes: nn.Parameter) -> None:
    """Replace the parameter ``name`` of a converted layer by the result of `as_parameter`; its recipe says so."""
    setattr(layer, name, codes)
    layer.take_recipe(layer.recipe.with_lifetime(PARAMETER))
    layer.reach_codes()


def quantize_weights(
    layers: Iterable[Any],
    *,
    keep_initial: bool,
    function: str,
    dtypes: Mapping[nn.Module, torch.dtype] = MappingProxyType({}),
) -> None:
    """Replace the weights of layers by codes and scales; shared weights stay shared.

    Call `check_weights` first. With ``keep_initial``, a weight also keeps the values before quantization. Weights that
    share an outer scale keep sharing it. ``function`` is the caller, for the text of errors. Weights of the layers in
    ``dtypes`` are cast first.
    """
    made: dict[Tensor, nn.Parameter] = {}
    layers = list(layers)
    # before any of the weights is replaced
    outer_amaxes = {layer: _amax_of_group(layer, dtypes.get(layer)) for layer in layers}
    for layer, name in [(each, name) for each in layers for name in weight_names(each)]:
        weight = getattr(layer, name)
        values = weight.detach().to(dtypes.get(layer, weight.dtype))
        if weight not in made:
            made[weight] = as_parameter(weight, name, _codes(layer, values, outer_amaxes[layer]), function=function)
            if keep_initial:
                local_itself(made[weight]).initial = local_itself(weight).detach()
        put_codes(layer, name, made[weight])
        if isinstance(layer.recipe.weight, DelayedScaling):
            layer.own_weight()
            assign([local_itself(layer.weight)], [local_itself(values)])
