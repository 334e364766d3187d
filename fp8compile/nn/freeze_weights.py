"""freeze_weights: replace the weights of a trained model by their codes, for inference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import nn

from fp8compile._compat import local_itself
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convertible_layers import is_converted, weight_names
from fp8compile.nn.quantize_weights import check_weights, quantize_weights
from fp8compile.nn.share_outer_scale import check_whole_groups
from fp8compile.quantizers import Recipe
from fp8compile.tensor import QuantizedParameter, in_place_of, is_quantized_parameter

__all__ = ["freeze_weights"]

FUNCTION = "freeze_weights"


def _frozen(recipe: Recipe) -> Recipe | None:
    """Return the recipe of a frozen layer, with the forward's codes only; None without codes of the weight.

    If the recipe has other codes for grad_input, the frozen layer's grad_input reads the forward's codes, dequantized.
    """
    if recipe.weight is None:
        return None
    if recipe.shares_weight_codes():
        return replace(recipe, keep_weight_codes=False) if recipe.keep_weight_codes else recipe
    if recipe.history():
        raise ValueError(
            "freeze_weights: a layer has delayed scaling for the output, and other quantizers of its weight for "
            "grad_input, so that one set of codes does not serve both. Take fp8compile.recipes.delayed()."
        )
    return replace(
        recipe,
        grad_output=None,
        weight_for_grad_input=None,
        grad_output_for_grad_weight=None,
        input_for_grad_weight=None,
        fast_accumulation_grad_input=False,
        fast_accumulation_grad_weight=False,
        keep_weight_codes=False,
        cache_weights=False,
        dequantized_gradients=True,
    )


def _forward_set(weight: QuantizedParameter) -> QuantizedParameter:
    """Return a quantized weight without its separate codes for grad_input."""
    if weight.quantizer_for_grad_input is None:
        return weight
    found = QuantizedParameter.of_sets(weight.sets()[:1], weight.dtype, batch=weight.batch)
    found.state = weight.state
    if weight.group is not None and weight.shard_dim is not None:
        found.group, found.shard_dim, found.sizes = weight.group, weight.shard_dim, weight.sizes
    return found


def _check_codes(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        for name in weight_names(layer):
            weight = attrgetter(name)(layer)
            if weight is not local_itself(weight) and local_itself(weight).quantizer_for_grad_input is not None:
                raise ValueError(
                    "freeze_weights: a weight has two sets of codes and is spread over ranks. Freeze it on one "
                    "process, and spread it after that."
                )


def _freeze(layer: nn.Module) -> None:
    for name in weight_names(layer):
        weight = attrgetter(name)(layer)
        local = local_itself(weight)
        if is_quantized_parameter(local):
            local.frozen = True
            local.initial = None
        weight.requires_grad_(requires_grad=False)


def freeze_weights(model: Model) -> Model:
    """Replace the weights of all FP8 layers by their codes for good, for inference or below adapters.

    Each weight then has only the codes that the forward reads, with the same codes and scales as in training. Nothing
    quantizes it again, and its values are gone. Outputs have the same bits as before. The weights require no gradient,
    and writing values to codes raises: a step of an optimizer, ``copy_``, a state dict with values. A state dict with
    codes loads. A weight keeps its values if the forward reads no codes of it.

    Gradients still flow to the inputs of the layers. If a recipe has separate codes of the weight for grad_input, such
    as ``fp8compile.recipes.rowwise()``, grad_input multiplies the values of the forward's codes in high precision.

    Layers with delayed scaling keep the scale of their input, because no forward changes it. For static scales without
    delayed scaling in training see `calibrate`.

    Args:
        model: A converted model, not compiled and not under FSDP. Its parameters may be values or codes.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: The model has no FP8 layer; or a weight can't be kept as the forward's codes alone: it is shared
            with a layer that is not converted, FSDP2 has sharded it, it has two sets of codes and is spread over
            ranks, its recipe has delayed scaling for one GEMM only, or it shares an outer scale with a layer outside
            of the model. The model is unchanged then.
    """
    check_model(FUNCTION, model)
    found: list[Any] = [module for module in model.modules() if is_converted(module)]
    if not found:
        raise ValueError(
            "freeze_weights: the model has no fp8compile.Linear and no experts in FP8. Call fp8compile.convert first."
        )
    recipes: dict[nn.Module, Recipe] = {layer: own for layer in found if (own := _frozen(layer.recipe)) is not None}
    quantized = [layer for layer in found if layer in recipes and layer.is_quantized()]
    values = {layer: own for layer, own in recipes.items() if layer not in quantized}
    check_weights(model, values, function=FUNCTION)
    check_whole_groups(FUNCTION, values, {module: name for name, module in model.named_modules()})
    _check_codes(quantized)
    for layer in found:
        layer.recipe = recipes.get(layer, layer.recipe)
    quantize_weights(values, keep_initial=False)
    for layer in quantized:
        for name in weight_names(layer):
            weight = attrgetter(name)(layer)
            one = local_itself(weight)
            if one.quantizer_for_grad_input is not None:
                setattr(layer, name, in_place_of(weight, _forward_set(one)))
    for layer in found:
        _freeze(layer)
    return model
