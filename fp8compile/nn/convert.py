"""convert and revert: turn linears and experts of a model into FP8 layers and back, in place."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.assign_recipes import Recipes, with_tail
from fp8compile.nn.cached_weights import check_caches
from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convertible_layers import (
    cannot_go_back,
    converted_class,
    go_back,
    is_converted,
    layers,
    put_in_float8,
)
from fp8compile.nn.delayed_state import check_amax_group
from fp8compile.nn.filters import Filter
from fp8compile.nn.parameter_uses.first_forward import stop_watching, watch_first_forward
from fp8compile.nn.parameter_uses.uses import forget_uses
from fp8compile.nn.quantize_weights import check_weights, quantize_weights
from fp8compile.nn.share_outer_scale import Groups, scale_groups, share_scales
from fp8compile.nn.why_not_converted import LEFT_OUT, recipes_and_reasons
from fp8compile.quantizers import Recipe

__all__ = ["convert", "revert"]

REASONS = 5  # the most reasons in the warning; the report has all of them
EXPORTED_LINEAR = torch.ops.aten.linear.default


def _is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code, after ``torch.compile(m)`` or ``m.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_not_compiled(model: nn.Module) -> None:
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"convert: {', '.join(compiled)} went through torch.compile already. Convert first, compile what convert "
            "returns."
        )


def _is_frozen(module: nn.Module) -> bool:
    """Whether the module is a graph of TorchScript or `torch.export`, in which linears are not modules."""
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


def _already(model: nn.Module, layer: nn.Module, lacks: str) -> ValueError:
    (name, *_) = dict(layers(model))[layer]
    return ValueError(
        f"convert: {name or 'the model'} is converted already, and {lacks}. Call fp8compile.revert(model) first, or "
        "leave it out by the filter."
    )


def _check_again(
    model: nn.Module,
    again: dict[nn.Module, Recipe],
    amax_group: ProcessGroup | None,
    *,
    quantized_parameters: bool,
) -> None:
    """Raise a ValueError if layers that are converted already, ``again``, are not what these arguments ask for."""
    for each, recipe in again.items():
        layer: Any = each
        if quantized_parameters and not layer.is_quantized():
            raise _already(model, layer, "its weights are values, without quantized_parameters")
        if amax_group is not None and recipe.history() and layer.amax_group != amax_group.group_name:
            raise _already(model, layer, "reduces amaxes over no such amax_group")


def _groups(
    model: nn.Module,
    recipes: dict[nn.Module, Recipe],
    again: dict[nn.Module, Recipe],
    given: Groups,
    *,
    quantized_parameters: bool,
) -> list[tuple[nn.Module, ...]]:
    """Return the groups of layers that are to share an outer scale, from convert's ``share_outer_scale`` (``given``).

    ``recipes`` has the layers that are converted now, ``again`` those that are converted already; groups of these are
    left out. Raise a ValueError if they are other groups than before, or if ``quantized_parameters`` is True too.
    """
    if given is False:
        return []
    if quantized_parameters:
        raise ValueError(
            "convert: share_outer_scale, and quantized_parameters: a write to one weight would change the codes of "
            "the others. Leave one of them out; fp8compile.load_quantized keeps the scales that a checkpoint has."
        )
    found = []
    for group in scale_groups(model, {**again, **recipes}, given):
        if (known := next((layer for layer in group if layer in again), None)) is None:
            found.append(group)
        elif set(getattr(known, "scale_group", ())) != set(group):
            raise _already(model, known, "shares no outer scale with exactly the layers of its group")
    return found


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
    share_outer_scale: Groups = False,
    strict: bool = False,
) -> Model:
    """Turn a model's ``nn.Linear`` layers and experts into FP8 layers, in place.

    An ``nn.Linear`` becomes a ``fp8compile.Linear``. Modules and parameters stay the same objects, so optimizers,
    hooks, tied weights and state dicts keep working. Subclasses of ``nn.Linear`` that inherit its forward are
    converted too, and so are the experts of transformers and torchtitan (see ``docs/experts.md``), but not their
    routers. Convert before ``torch.compile``.

    ``fp8compile.conversion_report(model)`` tells which layers were left out and why. The first forward warns if the
    model multiplies a converted layer's weight without calling the layer.

    Args:
        model: Any module.
        recipe: Quantizers for the layers' GEMMs. Or a mapping from name patterns to recipes, such as ``{"*.down_proj":
            a, "layers.*": b}``, in which the first pattern that matches decides. Or a function ``(module, fqn) ->
            Recipe``, called once for each layer that the other arguments leave to it. A layer stays in high precision
            if it gets None, or if no pattern matches it.
        filter: Which linears and experts to convert: a function ``(module, fqn) -> bool``, or name patterns
            (``"layers.*"``, ``"!lm_head"``). By default all that FP8 can speed up.
        keep_ends: Number of blocks at each end of the model that stay in high precision, together with the layers
            before the first block and after the last one. Blocks are the entries of the ``ModuleList`` or
            ``Sequential`` that has the most layers; in a model without such a container, each layer is a block.
        tail: The share of the model's blocks, counted from the end and rounded up, that get ``tail_recipe``, together
            with all layers after them. NVIDIA trains in four bits with 0.15.
        tail_recipe: Recipe of the tail, such as ``fp8compile.recipes.mxfp8()``; None for high precision.
        amax_group: The ranks over which amaxes are reduced, for delayed scaling, as in ``fp8compile.Linear``.
        quantized_parameters: Whether the weights of layers and experts are kept as codes and scales, without a copy in
            high precision. The parameters are new objects then. If forward and backward multiply different codes
            (rowwise, MX), a weight has the codes of both; see ``docs/parameters.md``.
        keep_initial: Whether to keep the values of quantized weights on the CPU, until ``fp8compile.MasterWeights``
            takes them. Under FSDP2 each rank keeps the values of its shards. For a weight on the meta device, the
            values that are written to it later are kept.
        share_outer_scale: Groups of names, such as ``[("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]``. The
            layers of one parent that have the names of a group share one outer scale, or one scale for the whole
            tensor, computed from the largest magnitude of their weights. A server that multiplies such layers as one
            matrix can then use the scales of training. True finds the groups by the names in transformers' models.
        strict: Whether to raise, instead of warning, if no layer is converted, and in the first forward if the model
            multiplies a converted layer's weight without calling the layer.

    Returns:
        The model.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The model has no layers, or with ``strict`` none is converted. Layers of a group in
            ``share_outer_scale`` have no common recipe, or have delayed scaling, a transform or quantized parameters.
            A pattern matches no layer. A layer is converted already with another recipe, another ``amax_group`` or
            ``share_outer_scale`` than given, or without the ``quantized_parameters`` that are. The model was compiled,
            scripted or exported. ``keep_ends`` or ``tail`` is out of range; ``tail_recipe``, ``keep_initial`` or
            ``amax_group`` is given without what it is for. A recipe has ``cache_weights``, and its layer can't keep
            codes. With ``quantized_parameters``: a recipe needs a weight's values, a weight is shared with
            a layer that is not converted, experts share a weight, or a weight is a DTensor of experts, a DTensor that
            FSDP2 has sharded, or a DTensor whose shards end within blocks. The model is unchanged then.
        RuntimeError: A weight to be quantized is a DTensor, on PyTorch 2.11.
    """
    check_model("convert", model)
    _check_not_compiled(model)
    _check_not_frozen(model)
    recipe = with_tail(model, recipe, tail, tail_recipe)
    plan, again = recipes_and_reasons(model, recipe, filter, keep_ends)
    given = [own for own, _ in plan.values() if own is not None] + list(again.values())
    check_amax_group("convert", given, amax_group, none_has="no layer gets")
    if keep_initial and not quantized_parameters:
        raise ValueError("convert: keep_initial is for quantized_parameters=True; else weights keep their values.")
    _check_again(model, again, amax_group, quantized_parameters=quantized_parameters)
    chosen = {layer: own for layer, (own, _) in plan.items() if own is not None}
    if quantized_parameters:
        check_weights(model, chosen)
    groups = _groups(model, chosen, again, share_outer_scale, quantized_parameters=quantized_parameters)
    shared = {layer for group in groups for layer in group}
    for layer, chosen_recipe in chosen.items():
        check_caches(chosen_recipe, layer, shares_scale=layer in shared)
        converted_class(layer)  # raises if a class can't be made, before any layer is changed
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
    share_scales(groups)
    watch_first_forward(model, set(chosen), strict=strict)
    return model


def revert(model: Model) -> Model:
    """Turn ``fp8compile.Linear`` layers into ``nn.Linear``, and experts into their own class, in place.

    Args:
        model: Any module.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module, or a layer can't be reverted without a loss. The model is unchanged then.
    """
    check_model("revert", model)
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
