"""The modules that `convert` can put in FP8: ``nn.Linear``, and modules of known hosts, such as experts."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.experts import (
    ConvertedModule,
    become_float8_hosted,
    become_plain_hosted,
    cannot_revert_hosted,
    hosted_class,
    is_hosted,
    layout_of,
    method_that_multiplies,
)
from fp8compile.nn.linear import Linear, become_float8, become_plain, cannot_revert
from fp8compile.nn.subclasses import float8_class
from fp8compile.quantizers import Recipe

__all__ = [
    "cannot_go_back",
    "converted_class",
    "device_of",
    "go_back",
    "is_converted",
    "is_layer",
    "layers",
    "matrices",
    "method_of",
    "put_in_float8",
    "weight_names",
    "weight_slots",
]


def is_layer(module: nn.Module) -> bool:
    """Whether `convert` considers a module: a linear, a linear by another name, or experts."""
    return isinstance(module, nn.Linear) or is_hosted(module)


def is_converted(module: nn.Module) -> TypeGuard[Linear | ConvertedModule]:
    """Whether a module is in FP8."""
    return isinstance(module, (Linear, ConvertedModule))


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """All linears, linears by another name, and experts of a model, each with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if is_layer(module):
            names.setdefault(module, []).append(fqn)
    yield from names.items()


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a layer multiplies by; ``"mlp.w1"`` is a child's parameter."""
    return ("weight",) if isinstance(layer, nn.Linear) else tuple(layout_of(layer).weights)


def weight_slots(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module (the layer or a child) and the name of each weight of a layer."""
    paths = (name.rpartition(".") for name in weight_names(layer))
    return [(layer.get_submodule(path), name) for path, _, name in paths]


def matrices(layer: nn.Module) -> list[tuple[int, int]]:
    """(out_features, in_features) of each matrix that multiplies a row: one for a linear, several for an expert."""
    if isinstance(layer, nn.Linear):
        return [(layer.out_features, layer.in_features)]
    return list(layout_of(layer).matrices)


def method_of(layer: nn.Module) -> str:
    """Name of the method with a layer's products; the forward of experts may call another method for them."""
    return "forward" if isinstance(layer, nn.Linear) else method_that_multiplies(layer)


def device_of(layer: nn.Module) -> torch.device:
    """Device of a layer's weights."""
    return attrgetter(weight_names(layer)[0])(layer).device


def converted_class(layer: nn.Module) -> type[Any]:
    """The class of a layer once it is converted. It is made before anything is changed, and may raise."""
    if isinstance(layer, nn.Linear):
        return float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
    return hosted_class(type(layer))


def put_in_float8(layer: nn.Module, recipe: Recipe, amax_group: ProcessGroup | None) -> None:
    """Swap a layer's class, in place: whoever else holds the module, in a list or a closure, has FP8 too."""
    if isinstance(layer, nn.Linear):
        converted: Any = layer
        converted.__class__ = float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
        become_float8(converted, recipe, amax_group if recipe.history() else None)
    else:
        become_float8_hosted(layer, recipe)


def cannot_go_back(layer: nn.Module) -> str | None:
    """Why a converted layer can't be reverted, or None."""
    return cannot_revert(layer) if isinstance(layer, Linear) else cannot_revert_hosted(layer)


def go_back(layer: nn.Module) -> None:
    """Undo `put_in_float8`."""
    if isinstance(layer, Linear):
        become_plain(layer)
        plain: Any = layer._plain
        layer.__class__ = plain
    else:
        become_plain_hosted(layer)
