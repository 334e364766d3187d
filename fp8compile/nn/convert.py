"""convert and revert: swap the linears and the experts of a model, in place."""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.assignment import Recipes, with_tail
from fp8compile.nn.candidates import (
    cannot_go_back,
    converted_class,
    go_back,
    is_converted,
    layers,
    put_in_float8,
)
from fp8compile.nn.filters import Filter
from fp8compile.nn.model_type import Model
from fp8compile.nn.parameter_uses import (
    forget_uses,
    stop_watching,
    watch_first_forward,
)
from fp8compile.nn.quantized_weights import check_weights, quantize_weights
from fp8compile.nn.state import check_amax_group
from fp8compile.nn.why_left_out import LEFT_OUT, recipes_and_reasons
from fp8compile.quantizers import Recipe

__all__ = ["convert", "revert"]

REASONS = 5  # in the warning; the report has them all
EXPORTED_LINEAR = torch.ops.aten.linear.default


def _is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module runs compiled code, by ``torch.compile(module)`` or ``module.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}; it is a torch.nn.Module.")


def _check_not_compiled(model: nn.Module) -> None:
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"convert: {', '.join(compiled)} went through torch.compile already. Convert first, compile what convert "
            "returns."
        )


def _is_frozen(module: nn.Module) -> bool:
    """Whether TorchScript or `torch.export` turned the module's linears into calls of a graph."""
    graph = getattr(module, "graph", None)
    exported = isinstance(graph, torch.fx.Graph) and graph.find_nodes(op="call_function", target=EXPORTED_LINEAR)
    return isinstance(module, torch.jit.ScriptModule) or bool(exported)


def _check_not_frozen(model: nn.Module) -> None:
    frozen = [fqn or "the model" for fqn, module in model.named_modules() if _is_frozen(module)]
    if frozen:
        raise ValueError(
            f"convert: {frozen[0]} is a graph made by torch.jit or torch.export, and its linears are calls in it. "
            "Convert the model that it was made of, or only the parts of this one that are no graph."
        )


def _say_that_nothing_is_converted(reasons: list[str], *, strict: bool) -> None:
    counted = Counter(reasons).most_common()
    left = ", ".join(f"{count} ({reason})" for reason, count in counted[:REASONS])
    more = f", and {len(counted) - REASONS} reasons more" if len(counted) > REASONS else ""
    text = (
        f"convert: no linear is converted. Left as they are: {left}{more}. See fp8compile.conversion_report(model) "
        "for each of them."
    )
    if strict:
        raise ValueError(text)
    warnings.warn(text, stacklevel=3)


def convert(
    model: Model,
    recipe: Recipes,
    *,
    filter: Filter | None = None,
    keep_ends: int = 0,
    tail: float = 0.0,
    tail_recipe: Recipe | None = None,
    amax_group: ProcessGroup | None = None,
    quantized_parameters: bool = False,
    keep_initial: bool = False,
    strict: bool = False,
) -> Model:
    """Turn the ``nn.Linear`` layers of a model into ``fp8compile.Linear``, and its experts into FP8, in place.

    Modules and parameters stay the same objects, so optimizers, hooks, tied weights and state dicts do not notice.
    Layers of a subclass that inherits its forward stay of that class too, and so do experts, of transformers and of
    torchtitan: see ``docs/experts.md``. Routers stay as they are. The first forward is watched: a layer whose weight
    the model multiplies itself, past the layer's forward, is warned of. Convert before ``torch.compile``. What was
    left out and why: ``fp8compile.conversion_report(model)``; a convert that leaves out all warns.

    Args:
        model: Any module.
        recipe: Quantizers for the layers' GEMMs; or a recipe for each name pattern (``{"*.down_proj": a, "layers.*":
            b}``), and the first pattern that matches decides; or a function ``(module, fqn) -> Recipe``, called once a
            layer. None in place of a recipe, and a name that no pattern matches, leave a layer in high precision.
        filter: Which layers: a function ``(module, fqn) -> bool``, or name patterns (``"layers.*"``, ``"!lm_head"``);
            by default all but those that FP8 can't help. It is asked about a module of experts as about a linear.
        keep_ends: How many blocks at each end of the model stay in high precision, with what is before the first and
            behind the last one: 1 for the first and last layers in bfloat16. Blocks are the entries of the model's
            largest ``ModuleList`` or ``Sequential``; without one, each linear is a block.
        tail: The share of the last blocks that get ``tail_recipe``, with all layers behind them, 0.15 as NVIDIA trains
            in four bits; blocks are those of ``keep_ends``. Rounded up to whole blocks.
        tail_recipe: Recipe of these layers, such as ``fp8compile.recipes.mxfp8()``; None for high precision.
        amax_group: The ranks that reduce their amaxes, for delayed scaling, as ``fp8compile.Linear`` takes it.
        quantized_parameters: Whether the layers' weights themselves become codes and scales, with nothing in high
            precision beside them, those of experts too; parameters are new objects then. Where forward and backward
            multiply different codes (rowwise, MX), they have both sets; see ``docs/parameters.md``.
        keep_initial: Whether the values that quantized weights had are kept on the CPU, until
            ``fp8compile.MasterWeights`` takes them. Under FSDP2 each rank keeps those of its shards. If a weight is on
            the meta device, what is written to it later is kept.
        strict: Whether to raise, instead of warning, where no layer at all is converted; and in the first forward, if
            a converted layer's weight is multiplied past the layer's forward.

    Returns:
        The model.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: There is no linear, or with ``strict`` none that is converted; a pattern matches none, a layer has
            another recipe already, the model was compiled, scripted or exported, or a group is given for recipes
            without delayed scaling; a recipe needs the values of a weight to be quantized; parts of a DTensor to be
            quantized cut blocks, FSDP2 has sharded it, it is of experts, or a module that stays as it is has the
            weight too, or experts share it. Nothing is changed then.
        RuntimeError: A weight to be quantized is a DTensor, on PyTorch 2.11.
    """
    _check_module("convert", model)
    _check_not_compiled(model)
    _check_not_frozen(model)
    recipe = with_tail(model, recipe, tail, tail_recipe)
    plan, again = recipes_and_reasons(model, recipe, filter, keep_ends)
    given = [own for own, _ in plan.values() if own is not None]
    check_amax_group("convert", given, amax_group, none_has="no layer gets")
    if keep_initial and not quantized_parameters:
        raise ValueError("convert: keep_initial is for quantized_parameters=True; else weights keep their values.")
    chosen = {layer: own for layer, (own, _) in plan.items() if own is not None}
    if quantized_parameters:
        check_weights(model, chosen)
    for layer in chosen:
        converted_class(layer)  # before the first is changed: a class that can't be made raises
    if plan and not chosen and not again:
        _say_that_nothing_is_converted([reason for _, reason in plan.values()], strict=strict)
    for layer, (own, reason) in plan.items():
        vars(layer).pop(LEFT_OUT, None)
        if own is None:
            setattr(layer, LEFT_OUT, reason)
        else:
            put_in_float8(layer, own, amax_group)
    if quantized_parameters:
        quantize_weights(chosen, keep_initial=keep_initial)
    watch_first_forward(model, set(chosen), strict=strict)
    return model


def revert(model: Model) -> Model:
    """Turn every ``fp8compile.Linear`` back into a ``nn.Linear``, and experts into theirs, in place.

    Args:
        model: Any module.

    Returns:
        The model.

    Raises:
        TypeError: The model is no module, or a layer can't go back without losing something. Nothing is changed then.
    """
    _check_module("revert", model)
    every = [layer for layer, _ in layers(model)]
    for layer in every:
        if is_converted(layer) and (reason := cannot_go_back(layer)) is not None:
            raise TypeError(f"revert: {reason}")
    if type(model).__name__ == "OptimizedModule" and is_converted(model.get_submodule("_orig_mod")):
        raise TypeError("revert: the layer itself was compiled, and would go on in FP8. Revert what was compiled.")
    stop_watching(model)
    for layer in every:
        vars(layer).pop(LEFT_OUT, None)
        forget_uses(layer)
        if is_converted(layer):
            go_back(layer)
    return model
