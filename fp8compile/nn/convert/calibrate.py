"""calibrate: set static scales of layers' inputs from their largest magnitudes in a pass over data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile import ops
from fp8compile._compat import autocast_dtype, is_dtensor
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.layer.linear import Linear, become_float8
from fp8compile.nn.weights.share_outer_scale import check_whole_groups
from fp8compile.ops.layer.delayed_scaling_state import ROW_OF_INPUT, ROW_OF_WEIGHT
from fp8compile.quantizers import CALL, PARAMETER, CurrentScaling, DelayedScaling, Quantizer, Recipe

__all__ = ["calibrate", "set_row"]


def _delayed(quantizer: Quantizer | None, like: DelayedScaling) -> DelayedScaling | None:
    """Return a DelayedScaling that makes the same codes as ``quantizer`` from the same scale; None if none can.

    ``like`` has the history and the algorithm.
    """
    if isinstance(quantizer, DelayedScaling):
        return quantizer
    if not isinstance(quantizer, CurrentScaling) or quantizer != CurrentScaling(format=quantizer.format):
        return None
    return replace(like, format=quantizer.format, margin=0)


def _static(recipe: Recipe) -> Recipe | None:
    """Return a copy of a recipe with stored scales (DelayedScaling) of input and weight; None if not possible."""
    if recipe.dequantized_output or recipe.dequantized_gradients:
        return None  # these read codes by current scaling
    own: dict[str, Any] = {}
    like = next((each for each in recipe.delayed() if each is not None), DelayedScaling(history=1))
    for roles in (("input", "input_for_grad_weight"), ("weight", "weight_for_grad_input")):
        given = [getattr(recipe, role) for role in roles]
        found = [None if each is None else _delayed(each, like) for each in given]
        if found[0] is None or (given[1] is not None and found[1] != found[0]):
            return None
        own.update(zip(roles, found, strict=True))
    return replace(recipe, **own, weight_lifetime=PARAMETER if recipe.weight_lifetime == PARAMETER else CALL)


@contextmanager
def _amaxes_of_inputs(layers: dict[Linear, Recipe]) -> Iterator[dict[Linear, Tensor]]:
    """Context that yields a dict: for each layer, the amax of its inputs in all calls so far, () float32."""
    found: dict[Linear, Tensor] = {}

    def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, Linear)
        x: Tensor = (*args, *kwargs.values())[0]
        if (dtype := autocast_dtype(x)) is not None:
            x = x.to(dtype)
        quantizer: Any = layers[layer].input
        amax = ops.amax(x.detach(), quantizer).view(())
        found[layer] = torch.maximum(found[layer], amax) if layer in found else amax

    handles = [layer.register_forward_pre_hook(seen, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _check(model: nn.Module, layers: dict[Linear, Recipe], names: dict[nn.Module, str]) -> None:
    if type(model).__name__ == "OptimizedModule":
        raise ValueError(
            "calibrate: the model is already compiled with torch.compile, which bypasses the hooks that observe "
            "inputs. Calibrate first, then compile."
        )
    if not layers:
        raise ValueError(
            "calibrate: no layer has a single scale for its input and a single scale for its weight, as with "
            "fp8compile.recipes.tensorwise() and delayed(). Other recipes compute their scales from the current "
            "values and need no calibration."
        )
    for layer in layers:
        if is_dtensor(layer.weight):
            raise ValueError(f"calibrate: {names[layer]} is sharded over ranks. Calibrate in a single process.")
        if layer.is_quantized() and not isinstance(layer.recipe.weight, DelayedScaling):
            raise ValueError(
                f"calibrate: the weight of {names[layer]} is already quantized. Calibrate before freeze_weights."
            )
    check_whole_groups("calibrate", layers, names)


def set_row(layer: Linear, row: int, quantizer: DelayedScaling, amax: Tensor) -> None:
    """Set one row (input or weight) of a layer's state of delayed scaling from an amax.

    ``quantizer`` computes the multiplier (1 / scale) from ``amax`` alone. Amaxes of earlier steps are dropped.
    """
    history, multiplier = torch.zeros_like(layer.amax_history[row]), torch.ones_like(layer.multiplier[row])
    history[0] = layer.amax_history[row, 0]  # that of a quantized weight
    history, multiplier = quantizer.next_state(history, multiplier, amax)
    layer.amax_history[row] = history
    layer.multiplier[row] = multiplier


@contextmanager
def _scaled_weights(layers: Iterable[Linear]) -> Iterator[None]:
    """Context that sets the multipliers of weights with delayed scaling that no step has set, from their values.

    The multipliers are those of before again if the context raises an error.
    """
    before: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        if isinstance(quantizer := layer.recipe.weight, DelayedScaling) and not layer.is_quantized():
            history, multiplier = layer.amax_history[ROW_OF_WEIGHT], layer.multiplier[ROW_OF_WEIGHT]
            before.append((multiplier, multiplier.clone()))
            multiplier.copy_(quantizer.multiplier_for_write(history, multiplier, _amax_of_weights(layer)))
    try:
        yield
    except BaseException:
        for own, earlier in before:
            own.copy_(earlier)
        raise


def _amax_of_weights(layer: Linear) -> Tensor:
    """Return the amax of a layer's weight, or of all weights that share its outer scale, () float32."""
    weights: list[Any] = [each.weight for each in layer.scale_group or (layer,)]
    return torch.stack([each.abs().amax().float() for each in weights]).amax()


def _make_static(layer: Linear, recipe: Recipe, amax: Tensor) -> None:
    """Give a layer the stored scales of ``recipe``, which `_static` made; ``amax`` is that of its inputs."""
    of_input, of_weight, before = recipe.input, recipe.weight, layer.recipe
    assert isinstance(of_input, DelayedScaling)
    assert isinstance(of_weight, DelayedScaling)
    of_weights = None if isinstance(before.weight, DelayedScaling) else _amax_of_weights(layer)
    layer.scale_group, layer.scale_quantizer = (), None
    if not before.history():
        become_float8(layer, recipe, None)
    elif not (isinstance(before.input, DelayedScaling) and isinstance(before.weight, DelayedScaling)):
        layer.recipe = recipe  # with the state that it has
    if of_weights is not None:
        set_row(layer, ROW_OF_WEIGHT, of_weight, of_weights)
    set_row(layer, ROW_OF_INPUT, of_input, amax)


def calibrate(model: Model, run: Callable[[Model], object]) -> Model:
    """Calibrate static input scales for a model's layers, in place, by running it on data.

    A layer whose recipe has one scale per input and one per weight is switched to delayed scaling. Its multipliers (1
    / scale) are computed from the largest magnitude of its inputs in this pass and from its weight. A weight with
    delayed scaling keeps a multiplier from training. A forward does not change the multipliers, but a later backward
    updates them, as in training with delayed scaling. Experts and layers with block scales are not changed.

    Layers that share a global scale get the multiplier of the largest of their weights. If you train them afterwards,
    they no longer share it, and each layer has its own state.

    Call `freeze_weights` afterwards to replace the weights with FP8 weights. ``fp8compile.export.save_pretrained``
    writes the static scales if the checkpoint format supports them.

    Args:
        model: A converted model, neither compiled nor sharded over ranks.
        run: A function that runs the model on calibration data. It is called once with the model, under ``no_grad``.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: The model is compiled, no layer has one scale per tensor, a layer's weight is sharded over ranks or
            quantized without delayed scaling, a layer shares a global scale with a layer outside of the model, ``run``
            did not call a layer, or a layer's inputs have an amax of 0, infinity or NaN. The model is then unchanged.
    """
    check_model("calibrate", model)
    names = {module: name or "the model" for name, module in model.named_modules()}
    every = [module for module in model.modules() if isinstance(module, Linear)]
    layers = {layer: own for layer in every if (own := _static(layer.recipe)) is not None}
    _check(model, layers, names)
    with torch.no_grad(), _scaled_weights(layers), _amaxes_of_inputs(layers) as amaxes:
        run(model)
        for layer in layers:
            if layer not in amaxes:
                raise ValueError(
                    f"calibrate: run never called {names[layer]}, so its input has no scale. Let run(model) call all "
                    "FP8 layers, or convert without this layer."
                )
            if not (amaxes[layer] > 0) or not amaxes[layer].isfinite():
                raise ValueError(
                    f"calibrate: the amax of the inputs of {names[layer]} is {amaxes[layer].item()}; it must be "
                    "positive and finite. Run batches whose activations are not all zero, and have no NaN or infinity."
                )
    with torch.no_grad():
        for layer, recipe in layers.items():
            _make_static(layer, recipe, amaxes[layer])
    return model
