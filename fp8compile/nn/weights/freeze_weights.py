"""freeze_weights: replace the weights of a trained model by their codes, for inference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fp8compile._compat import local_itself
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convertible.convertible_layers import is_converted, weight_names
from fp8compile.nn.layer.forward_dtype import forward_dtypes
from fp8compile.nn.weights.quantize_weights import check_weights, quantize_weights
from fp8compile.nn.weights.share_outer_scale import check_whole_groups
from fp8compile.quantizers import PARAMETER, Recipe
from fp8compile.tensor import QuantizedParameter, in_place_of, is_quantized_parameter, mark_replaced

__all__ = ["freeze_weights"]

FUNCTION = "freeze_weights"


def _frozen(recipe: Recipe) -> Recipe | None:
    """Return the recipe of a frozen layer, with the forward's codes only; None without codes of the weight.

    If the recipe has other codes for grad_input, the frozen layer's grad_input reads the forward's codes, dequantized.
    """
    if recipe.weight is None:
        return None
    if recipe.shares_weight_codes():
        return recipe.with_lifetime(PARAMETER)
    if recipe.history():
        raise ValueError(
            "freeze_weights: a layer has delayed scaling for the output, but quantizes its weight differently for "
            "grad_input, so a single quantized weight can't be used for both. Use fp8compile.recipes.delayed()."
        )
    return replace(
        recipe,
        grad_output=None,
        weight_for_grad_input=None,
        grad_output_for_grad_weight=None,
        input_for_grad_weight=None,
        fast_accumulation_grad_input=False,
        fast_accumulation_grad_weight=False,
        weight_lifetime=PARAMETER,
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
                    "freeze_weights: a weight has two quantized copies and is sharded over ranks. Freeze it in a "
                    "single process, then shard it."
                )


def _freeze(layer: nn.Module) -> None:
    for name in weight_names(layer):
        weight = attrgetter(name)(layer)
        local = local_itself(weight)
        if is_quantized_parameter(local):
            local.frozen = True
            local.initial = None
        weight.requires_grad_(requires_grad=False)


def freeze_weights(model: Model, *, forward_dtype: torch.dtype | None = None) -> Model:
    """Permanently replace the weights of all FP8 layers with FP8 weights, for inference or for training adapters.

    Each weight then stores only the quantized data that the forward reads, with the same data and scales as in
    training. The weight is never requantized, and its high-precision values are discarded. Outputs are bit-identical,
    except with delayed scaling that was neither trained nor calibrated, where the weight's scale is computed from the
    weight. Frozen weights do not require gradients. Writing high-precision values to them, by an optimizer step,
    ``copy_`` or a state dict, raises an error; a state dict with quantized weights can be loaded. A weight that the
    forward does not read quantized stays in high precision.

    Gradients still flow to the inputs of the layers. If a recipe quantizes the weight differently for grad_input, as
    ``fp8compile.recipes.rowwise()`` does, grad_input is computed in high precision with the dequantized weight of the
    forward.

    Layers with delayed scaling keep the scale of their input, because a forward does not change it. To get static
    scales without training with delayed scaling, see `calibrate`.

    Args:
        model: A converted model, not compiled and not wrapped in FSDP, with or without FP8 parameters.
        forward_dtype: Dtype to which the forward casts parameters before it quantizes them, such as the dtype of
            ``torch.autocast``. By default, each layer uses the dtype of its forward passes with gradients in this
            process, or else the dtype of its parameters. The frozen weights have this dtype.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: The model has no FP8 layer. Or a weight can't be frozen, because it is shared with a layer that is
            not converted, FSDP2 has sharded it, it has two quantized copies and is sharded over ranks, its recipe has
            delayed scaling for only one GEMM, or it shares a global scale with a layer outside of the model. Or the
            forward passes of a layer used several dtypes, or a dtype other than ``forward_dtype``. The model is then
            unchanged.
    """
    check_model(FUNCTION, model)
    found: list[Any] = [module for module in model.modules() if is_converted(module)]
    if not found:
        raise ValueError("freeze_weights: the model has no FP8 layers. Call fp8compile.convert first.")
    recipes: dict[nn.Module, Recipe] = {layer: own for layer in found if (own := _frozen(layer.recipe)) is not None}
    quantized = [layer for layer in found if layer in recipes and layer.is_quantized()]
    values = {layer: own for layer, own in recipes.items() if layer not in quantized}
    check_weights(model, values, function=FUNCTION)
    check_whole_groups(FUNCTION, values, {module: name for name, module in model.named_modules()})
    _check_codes(quantized)
    dtypes = {layer: attrgetter(weight_names(layer)[0])(layer).dtype for layer in values}
    dtypes = forward_dtypes(FUNCTION, model, dtypes, forward_dtype)
    for layer in found:
        layer.take_recipe(recipes.get(layer, layer.recipe))
    quantize_weights(values, keep_initial=False, function="fp8compile.freeze_weights", dtypes=dtypes)
    for layer in quantized:
        for name in weight_names(layer):
            weight = attrgetter(name)(layer)
            one = local_itself(weight)
            if one.quantizer_for_grad_input is not None:
                setattr(layer, name, in_place_of(weight, _forward_set(one)))
                mark_replaced(weight, "fp8compile.freeze_weights")
    for layer in found:
        _freeze(layer)
    return model
