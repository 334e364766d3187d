"""The modules that `convert` can put in FP8: ``nn.Linear``, and modules of known hosts, such as experts."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from fp8compile._compat import is_sharded_class
from fp8compile.nn.experts import (
    ConvertedModule,
    become_float8_hosted,
    become_plain_hosted,
    cannot_convert_hosted,
    cannot_revert_hosted,
    cannot_take_hosted,
    hosted_class,
    is_hosted,
    layout_of,
    method_that_multiplies,
)
from fp8compile.nn.linear import Linear, become_float8, become_plain, cannot_revert
from fp8compile.nn.subclasses import float8_class, names_taken
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, has_codes

__all__ = [
    "cannot_convert",
    "cannot_go_back",
    "cannot_take",
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


def _cannot_keep_class(module: nn.Linear) -> str | None:
    """Why a layer of a subclass of ``nn.Linear`` can't be converted and keep its class, or None."""
    cls = type(module)
    subclass = f"a subclass of nn.Linear ({cls.__qualname__})"
    if is_parametrized(module):
        return "its weight or bias is parametrized; convert first and parametrize what convert returns"
    if is_lazy(module.weight):
        return f"{subclass} whose parameters have no shape before the first call; call the model, then convert"
    if is_sharded_class(cls):
        return f"{subclass} that fully_shard made; convert first"
    if cls.forward is not nn.Linear.forward or cls.__call__ is not nn.Linear.__call__:
        return f"{subclass}, whose own forward would be lost"
    return None


def _cannot_convert_linear(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear and (reason := _cannot_keep_class(module)):
        return reason
    if names := names_taken(module):
        return f"it has an attribute {names[0]} of its own, and so has an FP8 layer"
    if "forward" in vars(module):
        return "its forward was replaced on the instance (a hook of another library?) and would be lost"
    is_codes = has_codes(module.weight)
    if is_codes or module.weight.layout != torch.strided:
        kind = type(module.weight).__name__ if is_codes else module.weight.layout
        return f"its weight is {kind}; FP8 layers take a dense one and quantize it themselves"
    if module.weight.dtype not in SOURCE_DTYPES:
        return f"weights are {module.weight.dtype}; FP8 layers take bfloat16, float16, float32"
    return None


def cannot_convert(layer: nn.Module) -> str | None:
    """Why a layer can't be converted by any recipe, or None."""
    return _cannot_convert_linear(layer) if isinstance(layer, nn.Linear) else cannot_convert_hosted(layer)


def cannot_take(layer: nn.Module, recipe: Recipe) -> str | None:
    """Why a layer can't be converted by this recipe, or None."""
    return None if isinstance(layer, nn.Linear) else cannot_take_hosted(layer, recipe)


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
