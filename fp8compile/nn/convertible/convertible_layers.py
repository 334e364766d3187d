"""The layers that `convert` can convert: ``nn.Linear``, and modules such as experts with a `ModuleSpec`.

A `ModuleSpec` describes how a module of another library multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fp8compile.nn.convertible.subclasses import float8_class
from fp8compile.nn.experts.converted_class import (
    ConvertedModule,
    become_float8_by_spec,
    become_plain_by_spec,
    cannot_revert_by_spec,
    fp8_class,
)
from fp8compile.nn.experts.known_modules import has_spec, layout_of, method_that_multiplies
from fp8compile.nn.layer.linear import Linear, become_float8, become_plain, cannot_revert
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
    """Whether a module is a ``nn.Linear``, or another library's linear or experts that `convert` knows."""
    return isinstance(module, nn.Linear) or has_spec(module)


def is_converted(module: nn.Module) -> TypeGuard[Linear | ConvertedModule]:
    """Whether a module is an FP8 layer: a `Linear`, or a converted module of another library."""
    return isinstance(module, (Linear, ConvertedModule))


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield each layer of a model that `is_layer` accepts, with all its fully qualified names."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if is_layer(module):
            names.setdefault(module, []).append(fqn)
    yield from names.items()


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that a layer multiplies by; ``"mlp.w1"`` is a child's parameter."""
    return ("weight",) if isinstance(layer, nn.Linear) else tuple(layout_of(layer).weights)


def weight_slots(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, name) for each weight of a layer; the module is the layer itself or a child."""
    paths = (name.rpartition(".") for name in weight_names(layer))
    return [(layer.get_submodule(path), name) for path, _, name in paths]


def matrices(layer: nn.Module) -> list[tuple[int, int]]:
    """Return (out_features, in_features) of each matrix that a layer multiplies a row by; an expert has several."""
    if isinstance(layer, nn.Linear):
        return [(layer.out_features, layer.in_features)]
    return list(layout_of(layer).matrices)


def method_of(layer: nn.Module) -> str:
    """Return the name of the method that runs a layer's GEMMs; for experts not always ``forward``."""
    return "forward" if isinstance(layer, nn.Linear) else method_that_multiplies(layer)


def device_of(layer: nn.Module) -> torch.device:
    """Return the device of a layer's weights."""
    return attrgetter(weight_names(layer)[0])(layer).device


def converted_class(layer: nn.Module) -> type[Any]:
    """Return the FP8 class that a layer would get; the layer is not changed."""
    if isinstance(layer, nn.Linear):
        return float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
    return fp8_class(type(layer))


def put_in_float8(layer: nn.Module, recipe: Recipe, amax_group: ProcessGroup | None) -> None:
    """Convert a layer in place by replacing its class, so that references to the layer stay valid.

    ``amax_group`` are the ranks that reduce amaxes for delayed scaling, or None.
    """
    if isinstance(layer, nn.Linear):
        converted: Any = layer
        converted.__class__ = float8_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
        become_float8(converted, recipe, amax_group if recipe.history() else None)
    else:
        become_float8_by_spec(layer, recipe)


def cannot_go_back(layer: nn.Module) -> str | None:
    """Return why a converted layer can't be reverted; None if it can."""
    return cannot_revert(layer) if isinstance(layer, Linear) else cannot_revert_by_spec(layer)


def go_back(layer: nn.Module) -> None:
    """Revert a converted layer in place, to the class that it had before `put_in_float8`."""
    if is_converted(layer):
        layer.forget_codes()
    if isinstance(layer, Linear):
        become_plain(layer)
        plain: Any = layer._plain
        layer.__class__ = plain
    else:
        become_plain_by_spec(layer)
