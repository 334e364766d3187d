"""Find the layers that share an outer scale, because an inference server fuses their weights into one matrix.

share_outer_scale=[("q_proj", "k_proj", "v_proj")]  --modules of one parent--> groups of layers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fp8compile.nn.convertible.convertible_layers import is_layer
from fp8compile.nn.layer.linear import Linear
from fp8compile.ops.layer.quantize_over_ranks import has_one_scale
from fp8compile.quantizers import DelayedScaling, Recipe
from fp8compile.tensor import shown

__all__ = ["FUSED", "Groups", "check_whole_groups", "scale_groups", "share_scales"]

# Layers that vLLM and SGLang multiply as one, by their names in models of transformers. They take the largest of the
# outer scales, and keep the codes.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))

Groups = bool | Sequence[Sequence[str]]


def _names(given: object) -> tuple[tuple[str, ...], ...]:
    """Return the layer names of each group in convert's ``share_outer_scale``, or raise a TypeError."""
    if given is True:
        return FUSED
    groups = list(given) if isinstance(given, (list, tuple)) else []
    found = [tuple(each) if isinstance(each, (list, tuple)) else () for each in groups]
    if not found or not all(len(each) > 1 and all(type(name) is str for name in each) for each in found):
        raise TypeError(
            f"convert: `share_outer_scale` is {shown(given)}; it must be True (layers that inference servers fuse "
            "into one GEMM), or a list of groups of names such as [('q_proj', 'k_proj', 'v_proj'), ('gate_proj', "
            "'up_proj')]."
        )
    return tuple(found)


def _refusal(name: str, members: Mapping[str, nn.Module], recipes: Mapping[nn.Module, Recipe]) -> str | None:
    """Return why layers of one parent, ``members`` by name, can't share an outer scale; None if they can."""
    if left := [each for each, layer in members.items() if layer not in recipes]:
        return (
            f"{', '.join(left)} of {name} stays in high precision, but the others do not. Convert all or none of them"
        )
    given = {recipes[layer] for layer in members.values()}
    if len(given) > 1:
        return f"{', '.join(members)} of {name} have different recipes. Use one recipe for all of them"
    (recipe,) = given
    if not all(type(layer) is nn.Linear or isinstance(layer, nn.Linear) for layer in members.values()):
        return f"{', '.join(members)} of {name} are not all nn.Linear. Exclude them with the filter"
    if isinstance(recipe.weight, DelayedScaling):
        return (
            f"the recipe of {name} uses delayed scaling, which keeps one scale per layer. Use a recipe with current "
            "scaling"
        )
    if recipe.weight is not None and recipe.weight.transform():
        return (
            f"the recipe of {name} transforms the weight, and the global scale is computed from the transformed "
            "values. Use a recipe without a transform of the weight"
        )
    return None


def scale_groups(model: nn.Module, recipes: Mapping[nn.Module, Recipe], given: object) -> list[tuple[nn.Module, ...]]:
    """Return the groups of layers that share an outer scale.

    Groups are left out if their recipe has neither an outer scale nor one scale for the whole tensor. ``recipes`` has
    the recipe of each layer that is converted; ``given`` is ``share_outer_scale`` of `fp8compile.convert`.

    Raises:
        TypeError: ``given`` is neither True nor a list of groups of names.
        ValueError: No module has two layers of a group, or layers of a group can't share a scale.
    """
    groups, matched = [], set()
    for name, parent in model.named_modules():
        layers = {own: layer for own, layer in parent.named_children() if is_layer(layer)}
        for names in _names(given):
            members = {own: layers[own] for own in names if own in layers}
            if len(members) < 2 or not any(layer in recipes for layer in members.values()):
                continue
            matched.add(names)
            if (reason := _refusal(name or "the model", members, recipes)) is not None:
                raise ValueError(
                    f"convert: share_outer_scale is not supported for {', '.join(members)} of {name or 'the model'}, "
                    f"because {reason}, or omit share_outer_scale."
                )
            recipe = recipes[next(iter(members.values()))]
            quantizers = (recipe.weight, recipe.weight_for_grad_input)
            if any(each is not None and has_one_scale(each) for each in quantizers):
                groups.append(tuple(members.values()))
    missing = [names for names in _names(given) if names not in matched]
    if not matched or (given is not True and missing):
        raise ValueError(
            f"convert: share_outer_scale: no module has two converted layers named {missing[0]}. Name layers that "
            "have the same parent."
        )
    return groups


def check_whole_groups(function: str, layers: Collection[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Raise a ValueError if one of ``layers`` shares an outer scale with a layer of values that is not one of them.

    ``function`` is the beginning of the error's text.
    """
    for layer in layers:
        others = [each for each in getattr(layer, "scale_group", ()) if isinstance(each, Linear)]
        if any(each not in layers and not each.is_quantized() for each in others):
            raise ValueError(
                f"{function}: {names[layer] or 'the model'} shares a global scale with layers outside of this "
                "model. Pass a model that contains all layers of the group."
            )


def share_scales(groups: Iterable[tuple[nn.Module, ...]]) -> None:
    """Let the converted layers of each group share one outer scale."""
    for members in groups:
        for each in members:
            layer: Any = each
            assert isinstance(layer, Linear), "scale_groups has checked it"
            layer.share_scale(members)
