"""set_recipe: change the forward's recipe during training, as NVIDIA does near the end of 4-bit runs."""

from __future__ import annotations

from dataclasses import replace

from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convert.why_not_converted import cannot_take
from fp8compile.nn.convertible.convertible_layers import is_converted
from fp8compile.nn.experts.converted_class import ConvertedModule
from fp8compile.nn.experts.known_modules import holds_no_stacks
from fp8compile.nn.layer.cached_weights import CACHES, why_not_cached
from fp8compile.nn.layer.linear import Linear
from fp8compile.quantizers import CALL, GEMMS, PASS, STEP, Recipe

__all__ = ["set_recipe"]

OF_ALL_PRODUCTS = ("emulate", "by_mx")  # fields of a recipe


def _with_forward(recipe: Recipe, forward: Recipe | None) -> Recipe:
    taken = forward or Recipe()
    lifetime = recipe.weight_lifetime if recipe.weight_lifetime == STEP else CALL
    if lifetime == CALL and taken.keeps_weight_for_backward() and taken.weight == recipe.weight_for_grad_input:
        lifetime = PASS
    return replace(
        recipe,
        input=taken.input,
        weight=taken.weight,
        weight_lifetime=lifetime,
        fast_accumulation_output=taken.fast_accumulation_output,
        dequantized_output=taken.dequantized_output,
        dequantized_gradients=_has_codes(taken) and _dequantizes(recipe, taken),
    )


def _has_codes(recipe: Recipe) -> bool:
    return recipe.input is not None or recipe.weight is not None


def _dequantizes(recipe: Recipe, forward: Recipe) -> bool:
    """Whether, after `set_recipe`, gradients multiply the dequantized codes of ``forward``.

    If the forward of the layer's ``recipe`` has codes, ``recipe.dequantized_gradients`` decides; else ``forward``'s.
    """
    if _has_codes(recipe):
        return recipe.dequantized_gradients
    return forward.dequantized_gradients and any(recipe.quantizers(gemm) is None for gemm in GEMMS[1:])


def _cannot(layer: Linear | ConvertedModule, forward: Recipe | None) -> str | None:
    """Return why a layer's outputs can't be computed with the recipe ``forward``; None if they can."""
    if layer.recipe.history() or (forward is not None and forward.history()):
        return "delayed scaling keeps a state for each operand, which would become stale with another forward"
    if layer.is_quantized():
        return "its weight is quantized and can only be used with the recipe it was quantized for"
    if isinstance(layer, Linear) and layer.scale_group:
        return "it shares a global scale with other layers"
    if hasattr(layer, "graph_fsdp") or hasattr(layer, "weight_scales"):
        return "FSDP already all-gathers its weight for the original recipe"
    for name in OF_ALL_PRODUCTS:
        if getattr(forward, name, False) and not getattr(layer.recipe, name):
            return f"{name}=True applies to all GEMMs of a layer, so it must be in the recipe of convert too"
    changed = _with_forward(layer.recipe, forward)
    if changed.weight_lifetime == STEP and (reason := why_not_cached(changed, holds_no_stacks(layer))) is not None:
        return f"its recipe has {CACHES}, but {reason}"
    return cannot_take(layer, changed)


def set_recipe(model: Model, *, forward: Recipe | None) -> Model:
    """Switch the forward of a model's FP8 layers to another recipe; the recipe of the gradients does not change.

    The next call recompiles. Weights, optimizers and checkpoints are not affected.

    Args:
        model: A converted model, compiled or not.
        forward: The recipe for the forward. Its ``input`` and ``weight`` quantizers, ``fast_accumulation_output`` and
            ``dequantized_output`` are used. None computes outputs in the dtype of the weights, bit for bit like the
            reverted model. If the layers' recipe has ``dequantized_gradients``, gradients use the dequantized operands
            of the new forward. With None, gradients use x and the weights, until a forward with
            ``dequantized_gradients`` is set.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module, or ``forward`` is not a recipe.
        ValueError: The model has no FP8 layer, or the forward of a layer can't be changed: the layer has delayed
            scaling, a quantized weight or a shared global scale, was prepared for FSDP by this package, or has
            ``weight_lifetime="step"`` but could not cache the new quantized weight; experts do not support the recipe;
            or ``forward`` has ``emulate`` or ``by_mx``, but the layer's recipe does not. The model is then unchanged.
    """
    check_model("set_recipe", model)
    if forward is not None and not isinstance(forward, Recipe):
        raise TypeError(
            f"set_recipe: `forward` must be a fp8compile.Recipe, or None for high precision; got {forward!r}."
        )
    layers = {name: module for name, module in model.named_modules() if is_converted(module)}
    if not layers:
        raise ValueError("set_recipe: the model has no FP8 layers. Call fp8compile.convert first.")
    for name, layer in layers.items():
        if (reason := _cannot(layer, forward)) is not None:
            raise ValueError(f"set_recipe: the forward of {name or 'the model'} can't be changed: {reason}.")
    for layer in layers.values():
        layer.recipe = _with_forward(layer.recipe, forward)
    return model
