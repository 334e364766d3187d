"""convert and revert: turn linears and experts of a model into FP8 layers and back, in place."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.check_model import Model, check_model
from fp8compile.nn.convert.check_not_in_ddp import check_not_in_ddp
from fp8compile.nn.convert.why_not_converted import AT_AN_END, LEFT_OUT, recipes_and_reasons
from fp8compile.nn.convertible.assign_recipes import Recipes, with_tail
from fp8compile.nn.convertible.convertible_layers import (
    cannot_go_back,
    converted_class,
    go_back,
    is_converted,
    layers,
    put_in_float8,
    weight_names,
)
from fp8compile.nn.convertible.filters import Filter
from fp8compile.nn.experts.known_modules import holds_no_stacks
from fp8compile.nn.layer.cached_weights import check_caches
from fp8compile.nn.layer.delayed_state import check_amax_group
from fp8compile.nn.layer.tensor_parallel_weights import PLAIN_STYLE
from fp8compile.nn.parameter_uses.first_forward import stop_watching, watch_first_forward
from fp8compile.nn.parameter_uses.uses import forget_uses
from fp8compile.nn.weights.quantize_weights import (
    COMPUTED,
    CONVERT,
    check_weights,
    has_computed_weight,
    makes_parameters,
    quantize_weights,
)
from fp8compile.nn.weights.share_outer_scale import Groups, scale_groups, share_scales
from fp8compile.quantizers import Recipe, accept_lifetime_flags

__all__ = ["convert", "revert"]

CONVERT_TO_PARAMETERS = "fp8compile.convert(weight_lifetime='parameter')"
REASONS = 5  # the most reasons in the warning; the report has all of them
EXPORTED_LINEAR = torch.ops.aten.linear.default


def _is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code, after ``torch.compile(m)`` or ``m.compile()``."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _check_not_compiled(model: nn.Module) -> None:
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise ValueError(
            f"convert: {', '.join(compiled)} is already compiled with torch.compile. Call convert first, then "
            "compile the model that it returns."
        )


def _check_plan_comes_later(model: nn.Module, chosen: Container[nn.Module]) -> None:
    styled = [(fqn, module) for fqn, module in model.named_modules() if PLAIN_STYLE in vars(module)]
    early = [fqn or "the model" for fqn, module in styled if module in chosen]
    if early:
        raise ValueError(
            f"convert: a style of fp8compile.parallel was applied to {', '.join(early)} in high precision, so its "
            "gathers would stay in high precision. Call convert first, then parallelize_module."
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
            f"convert: {frozen[0]} is a graph from torch.jit or torch.export, in which linear layers are function "
            "calls instead of modules. Convert the original model, or only the submodules that are not graphs."
        )


def _say_that_nothing_is_converted(reasons: list[str], *, strict: bool) -> None:
    counted = Counter(reasons).most_common()
    left = ", ".join(f"{count} ({reason})" for reason, count in counted[:REASONS])
    more = f", and {len(counted) - REASONS} reasons more" if len(counted) > REASONS else ""
    text = (
        f"convert: no linear layer was converted. Skipped: {left}{more}. See fp8compile.conversion_report(model) "
        "for the reason of each layer."
    )
    if strict:
        raise ValueError(text)
    warnings.warn(text, stacklevel=4)


def _warn_of_many_ends(reasons: list[str], keep_ends: int) -> None:
    kept = reasons.count(AT_AN_END.format(keep_ends))
    if 3 * kept > len(reasons):
        warnings.warn(
            f"convert: keep_ends={keep_ends} leaves {kept} of {len(reasons)} layers in high precision: the ends of "
            "each list of blocks, and the layers outside of lists. To leave out fewer layers, name them by the filter "
            "instead, such as filter='!lm_head'.",
            stacklevel=4,
        )


def _already(model: nn.Module, layer: nn.Module, lacks: str) -> ValueError:
    (name, *_) = dict(layers(model))[layer]
    return ValueError(
        f"convert: {name or 'the model'} is already converted, and {lacks}. Call fp8compile.revert(model) first, or "
        "exclude it with the filter."
    )


def _check_again(
    model: nn.Module,
    again: dict[nn.Module, Recipe],
    amax_group: ProcessGroup | None,
) -> None:
    """Raise a ValueError if layers that are converted already, ``again``, are not what these arguments ask for."""
    for each, recipe in again.items():
        layer: Any = each
        if amax_group is not None and recipe.history() and layer.amax_group != amax_group.group_name:
            raise _already(model, layer, "does not reduce amaxes over this amax_group")


def _groups(
    model: nn.Module,
    recipes: dict[nn.Module, Recipe],
    again: dict[nn.Module, Recipe],
    given: Groups,
) -> list[tuple[nn.Module, ...]]:
    """Return the groups of layers that are to share an outer scale, from convert's ``share_outer_scale`` (``given``).

    ``recipes`` has the layers that are converted now, ``again`` those that are converted already; groups of these are
    left out. Raise a ValueError if they are other groups than before, or if a recipe makes FP8 parameters.
    """
    if given is False:
        return []
    found = []
    for group in scale_groups(model, {**again, **recipes}, given):
        if (known := next((layer for layer in group if layer in again), None)) is not None:
            if set(getattr(known, "scale_group", ())) != set(group):
                raise _already(model, known, "does not share its global scale with exactly the layers of its group")
            continue
        if any(makes_parameters(recipes[layer]) for layer in group):
            raise ValueError(
                "convert: share_outer_scale can't be combined with weight_lifetime='parameter', because a write to "
                "one weight would requantize the others. Use only one of them. fp8compile.load_quantized keeps the "
                "scales of a checkpoint."
            )
        found.append(group)
    return found


@accept_lifetime_flags
def convert(
    model: Model,
    recipe: Recipes,
    *,
    filter: Filter | None = None,
    keep_ends: int = 0,
    tail: float = 0.0,
    tail_recipe: Recipe | None = None,
    amax_group: ProcessGroup | None = None,
    weight_lifetime: str | None = None,
    keep_initial: bool = False,
    share_outer_scale: Groups = False,
    strict: bool = False,
) -> Model:
    """Turn a model's ``nn.Linear`` layers and experts into FP8 layers, in place.

    An ``nn.Linear`` becomes an ``fp8compile.Linear``. Modules and parameters keep their identity, so optimizers,
    hooks, tied weights and state dicts keep working. Subclasses of ``nn.Linear`` that inherit its forward are also
    converted, and so are the experts (but not the routers) of transformers and torchtitan; see ``docs/experts.md``.
    Call ``convert`` before ``torch.compile``.

    ``fp8compile.conversion_report(model)`` shows which layers were not converted and why. The first forward pass warns
    if the model uses the weight of a converted layer without calling the layer.

    Args:
        model: Any module.
        recipe: The recipe for all layers. Or a mapping from name patterns to recipes, such as ``{"*.down_proj": a,
            "layers.*": b}``, in which the first matching pattern applies. Or a function ``(module, fqn) -> Recipe``,
            called once for each layer not excluded by the other arguments. A layer stays in high precision if its
            recipe is None, or if no pattern matches.
        filter: Which linear layers and experts to convert: a function ``(module, fqn) -> bool``, or name patterns
            (``"layers.*"``, ``"!lm_head"``). By default, all that are large enough to benefit.
        keep_ends: Number of transformer blocks at each end to leave in high precision, together with all layers
            outside of the blocks, such as the output head. Blocks are the entries of the outermost ``ModuleList`` and
            ``Sequential`` modules that contain layers. If there are several such lists, for example an encoder and a
            decoder, this applies to each. In a model without them, each layer is a block. Warns if more than a third
            of the layers stay in high precision.
        tail: Fraction of the model's blocks, counted from the end and rounded up, that use ``tail_recipe``, together
            with all layers after them. Blocks of several lists are concatenated. NVIDIA uses 0.15 for FP4 training.
        tail_recipe: Recipe of the tail, such as ``fp8compile.recipes.mxfp8()``; None for high precision.
        amax_group: The ranks over which amaxes are reduced for delayed scaling, as in ``fp8compile.Linear``.
        weight_lifetime: How long the FP8 data of weights live, instead of what each recipe says; see
            ``fp8compile.Recipe``. With ``"parameter"``, parameters are new objects. If forward and backward quantize
            the weight differently (rowwise, MX), both copies are stored; see ``docs/parameters.md``.
        keep_initial: Whether to keep the high-precision values of FP8 parameters on the CPU, for
            ``fp8compile.MasterWeights`` to start from. With FSDP2, each rank keeps the values of its shards. For a
            weight on the meta device, this applies to the values written to it later.
        share_outer_scale: Groups of names, such as ``[("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]``.
            Layers of the same parent with the names of a group share one global scale (or tensorwise scale), computed
            from the largest magnitude of their weights. A server that fuses such layers into one GEMM can then use the
            scales from training. True uses the names of the models in transformers.
        strict: Whether to raise an error instead of a warning if no layer is converted, or if the first forward pass
            uses the weight of a converted layer without calling the layer.

    Returns:
        The model.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The model has no layers, or ``strict`` is set and none is converted. A pattern matches no layer.
            The model was compiled, scripted or exported, or a style of `fp8compile.parallel` was applied to a layer
            before. A layer was already converted with a different recipe, ``amax_group``, ``share_outer_scale`` or
            ``weight_lifetime``. Layers of a group in ``share_outer_scale`` have different recipes, delayed scaling, a
            transform or FP8 parameters. ``keep_ends`` or ``tail`` is out of range. ``tail_recipe``, ``keep_initial``
            or ``amax_group`` is given without the option that it belongs to. ``weight_lifetime`` has another value, or
            it is ``"pass"`` for a recipe that quantizes a weight twice, or ``"step"`` for a layer that can't cache
            quantized weights. With ``"parameter"``, a recipe needs the high-precision weight, a weight is shared with
            a layer that is not converted, experts share a weight, or a weight is a DTensor of experts, a DTensor
            sharded by FSDP2, or a DTensor whose shards end within blocks. The model is then unchanged.
        RuntimeError: A weight to be quantized is a DTensor, and PyTorch is version 2.11.
    """
    check_model("convert", model)
    _check_not_compiled(model)
    _check_not_frozen(model)
    recipe = with_tail(model, recipe, tail, tail_recipe)
    plan, again = recipes_and_reasons(model, recipe, filter, keep_ends, weight_lifetime)
    computed = [layer for layer, (own, _) in plan.items() if makes_parameters(own) and has_computed_weight(layer)]
    plan |= dict.fromkeys(computed, (None, COMPUTED))
    given = [own for own, _ in plan.values() if own is not None] + list(again.values())
    check_amax_group("convert", given, amax_group, none_has="no layer gets")
    if keep_initial and not any(map(makes_parameters, given)):
        raise ValueError(
            "convert: keep_initial requires weight_lifetime='parameter'; otherwise, weights stay in high precision, "
            "so there are no other initial values to keep. Omit keep_initial, or pass weight_lifetime='parameter'."
        )
    _check_again(model, again, amax_group)
    chosen = {layer: own for layer, (own, _) in plan.items() if own is not None}
    _check_plan_comes_later(model, chosen)
    to_quantize = {layer: own for layer, own in chosen.items() if makes_parameters(own)}
    if to_quantize:
        check_weights(model, to_quantize)
        check_not_in_ddp(CONVERT, [attrgetter(name)(layer) for layer in to_quantize for name in weight_names(layer)])
    groups = _groups(model, chosen, again, share_outer_scale)
    shared = {layer for group in groups for layer in group}
    for layer, chosen_recipe in chosen.items():
        check_caches(chosen_recipe, holds_no_stacks(layer), shares_scale=layer in shared)
        converted_class(layer)  # raises if a class can't be made, before any layer is changed
    if plan and not chosen and not again:
        _say_that_nothing_is_converted([reason for _, reason in plan.values()], strict=strict)
    elif plan:
        _warn_of_many_ends([reason for _, reason in plan.values()], keep_ends)
    for layer, (own, reason) in plan.items():
        vars(layer).pop(LEFT_OUT, None)
        if own is None:
            setattr(layer, LEFT_OUT, reason)
        else:
            put_in_float8(layer, own, amax_group)
    quantize_weights(to_quantize, keep_initial=keep_initial, function=CONVERT_TO_PARAMETERS)
    share_scales(groups)
    watch_first_forward(model, set(chosen), strict=strict)
    return model


def revert(model: Model) -> Model:
    """Convert ``fp8compile.Linear`` layers back to ``nn.Linear``, and experts back to their original class, in place.

    Args:
        model: Any module.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module, or a layer can't be reverted losslessly. The model is then unchanged.
    """
    check_model("revert", model)
    every = [layer for layer, _ in layers(model)]
    for layer in every:
        if is_converted(layer) and (reason := cannot_go_back(layer)) is not None:
            raise TypeError(f"revert: {reason}")
    if type(model).__name__ == "OptimizedModule" and is_converted(model.get_submodule("_orig_mod")):
        raise TypeError(
            "revert: the model is a compiled FP8 layer, which would still run in FP8. Revert the module that was "
            "passed to torch.compile."
        )
    stop_watching(model)
    for layer in every:
        vars(layer).pop(LEFT_OUT, None)
        forget_uses(layer)
        if is_converted(layer):
            go_back(layer)
    return model
