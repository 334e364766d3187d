"""The layers that `convert` can convert: ``nn.Linear``, and modules that a `Host` describes, such as experts."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.experts.converted_class import (
    ConvertedModule,
    become_float8_hosted,
    become_plain_hosted,
    cannot_revert_hosted,
    hosted_class,
)
from fp8compile.nn.experts.known_modules import is_hosted, layout_of, method_that_multiplies
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
    """Whether a module is a layer for `convert`: a linear, another library's linear layer, or experts."""
    return isinstance(module, nn.Linear) or is_hosted(module)


def is_converted(module: nn.Module) -> TypeGuard[Linear | ConvertedModule]:
    """Whether a module is converted to FP8."""
    return isinstance(module, (Linear, ConvertedModule))


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """All layers of a model as `is_layer` defines them, each with all its fully qualified names."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if is_layer(module):
            names.setdefault(module, []).append(fqn)
    yield from names.items()


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a layer multiplies by; ``"mlp.w1"`` is a child's parameter."""
    return ("weight",) if isinstance(layer, nn.Linear) else tuple(layout_of(layer).weights)


def weight_slots(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """For each weight of a layer, the module that holds it (the layer or a child) and its name there."""
    paths = (name.rpartition(".") for name in weight_names(layer))
    return [(layer.get_submodule(path), name) for path, _, name in paths]


def matrices(layer: nn.Module) -> list[tuple[int, int]]:
    """(out_features, in_features) of each matrix that multiplies a row: one for a linear, several for an expert."""
    if isinstance(layer, nn.Linear):
        return [(layer.out_features, layer.in_features)]
    return list(layout_of(layer).matrices)


def method_of(layer: nn.Module) -> str:
    """Name of the method that computes a layer's products; for experts it may be another one than ``forward``."""
    return "forward" if isinstance(layer, nn.Linear) else method_that_multiplies(layer)


def device_of(layer: nn.Module) -> torch.device:
    """Device of a layer's weights."""
    return attrgetter(weight_names(layer)[0])(layer).device


def converted_class(layer: nn.Module) -> type[Any]:
    """The class that a layer gets when it is converted. This may raise, and changes no layer."""
    if isinstance(layer, nn.Linear):
        return float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
    return hosted_class(type(layer))


def put_in_float8(layer: nn.Module, recipe: Recipe, amax_group: ProcessGroup | None) -> None:
    """Convert a layer in place by replacing its class, so that all references to the module see the FP8 layer."""
    if isinstance(layer, nn.Linear):
        converted: Any = layer
        converted.__class__ = float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
        become_float8(converted, recipe, amax_group if recipe.history() else None)
    else:
        become_float8_hosted(layer, recipe)


def cannot_go_back(layer: nn.Module) -> str | None:
    """The reason why a converted layer can't be reverted, or None."""
    return cannot_revert(layer) if isinstance(layer, Linear) else cannot_revert_hosted(layer)


def go_back(layer: nn.Module) -> None:
    """Undo `put_in_float8` for a layer, in place."""
    if isinstance(layer, Linear):
        become_plain(layer)
        plain: Any = layer._plain
        layer.__class__ = plain
    else:
        become_plain_hosted(layer)
