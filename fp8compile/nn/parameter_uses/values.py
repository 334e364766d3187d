"""What an expression may be, as far as it matters to parameters: a set of the things below; empty for a constant.

    DATA       something computed from what a module is called with
    Slot       a parameter, or what is computed from parameters alone
    Object     any other object: a module, a list of modules, a function, a package
    Method     a method of an object
    Computed   a property of an object
    Local      a function that another one defines
    Super      what ``super()`` gives

A container that the source writes down is the set of what it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.parameter_uses.source import Code

__all__ = [
    "DATA", "NOTHING", "NO_NUMBERS", "UNKNOWN", "Computed", "Local", "Method", "Object", "Slot", "Super", "Value",
    "attribute", "constant_attribute", "elements", "value_of",
]  # fmt: skip

DATA = "data"
UNKNOWN = object()  # of a constant: nothing tells
Value = frozenset[Any]
NOTHING = Value()
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)

# take a tensor, or are asked of one, and give no number of it
NO_NUMBERS = frozenset({
    "isinstance", "issubclass", "hasattr", "callable", "len", "id", "type", "print", "repr", "str", "bool", "range",
    "is_tensor", "is_floating_point", "is_complex", "is_grad_enabled", "is_autocast_enabled",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    "shape", "size", "dtype", "device", "layout", "ndim", "dim", "numel", "nelement", "stride", "storage_offset",
    "element_size", "itemsize", "nbytes", "names", "grad", "grad_fn", "requires_grad", "requires_grad_", "is_leaf",
    "is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse", "is_quantized", "is_contiguous", "get_device",
    "data_ptr", "untyped_storage", "register_hook", "retain_grad", "placements", "device_mesh",
})  # fmt: skip


class Object:
    """Any object, equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Slot:
    """A parameter of a module."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class Method:
    """A function and what it is called on."""

    function: Any
    owner: Object


@dataclass(frozen=True)
class Computed:
    """The function of a property and what it is called on."""

    function: Any
    owner: Object


@dataclass(frozen=True)
class Super:
    """A search for attributes of an owner, in the classes behind one of its own."""

    cls: type
    owner: Object


@dataclass(frozen=True, eq=False)
class Local:
    """A function defined in another one, and the frame of that one."""

    code: Code
    frame: Any


def value_of(found: Any) -> Value:
    """What is followed of an object."""
    if isinstance(found, PLAIN):
        return NOTHING
    if isinstance(found, MethodType):
        return Value([Method(found.__func__, Object(found.__self__))])
    return Value([Object(found)])


def _of_classes(classes: Iterable[type], name: str, owner: Object) -> Value:
    """What a class has of an attribute, as Python would give it for the owner."""
    for each in classes:
        if name not in vars(each):
            continue
        found = vars(each)[name]
        if isinstance(found, staticmethod):
            return value_of(found.__func__)
        if isinstance(found, classmethod):
            cls = owner.value if isinstance(owner.value, type) else type(owner.value)
            return Value([Method(found.__func__, Object(cls))])
        if isinstance(found, (property, functools.cached_property)):
            return Value([Computed(found.fget if isinstance(found, property) else found.func, owner)])
        return Value([Method(found, owner)]) if isinstance(found, FunctionType) else value_of(found)
    return Value([DATA])  # somebody may set it, or compute it


def _slot(module: nn.Module, name: str) -> Value:
    """Parameters of one dim are biases, norms, scales: no matrices, and nothing to follow."""
    parameter = module._parameters[name]
    return NOTHING if parameter is None or is_lazy(parameter) or parameter.ndim < 2 else Value([Slot(module, name)])


def attribute(thing: Any, name: str) -> Value:
    """What ``thing.name`` may be, of a thing that is neither data nor a parameter."""
    if isinstance(thing, Super):
        classes = type(thing.owner.value).__mro__
        return _of_classes(classes[classes.index(thing.cls) + 1 :], name, thing.owner)
    if not isinstance(thing, Object):
        return Value([DATA])
    owner = thing.value
    if isinstance(owner, nn.Module):
        if name in owner._parameters:
            return _slot(owner, name)
        if name in owner._modules or name in owner._buffers:
            return value_of(owner._modules.get(name))
    if isinstance(owner, type):
        return _of_classes(owner.__mro__, name, thing)
    own = getattr(owner, "__dict__", {})
    return value_of(own[name]) if name in own else _of_classes(type(owner).__mro__, name, thing)


def constant_attribute(owner: Any, name: str) -> Any:
    """An attribute that is there, with no code of anybody's run to get it; else `UNKNOWN`."""
    if name == "training":  # it changes
        return UNKNOWN
    places = [getattr(owner, "__dict__", {})]
    if isinstance(owner, nn.Module):
        places += [owner._parameters, owner._modules, owner._buffers]
    found = next((place[name] for place in places if name in place), UNKNOWN)
    if found is UNKNOWN:
        found = next((vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)), UNKNOWN)
        return UNKNOWN if hasattr(found, "__get__") else found
    return found


def elements(thing: Any, key: Any = UNKNOWN) -> Value:
    """What is in a container, or what of it is at a key; of anything else the thing itself."""
    held = thing.value if isinstance(thing, Object) else None
    if isinstance(held, nn.Module) and not hasattr(type(held), "__getitem__"):
        return Value([thing])  # no container: what is unpacked here came out of one already
    if isinstance(held, nn.Module):
        slots = {name: _slot(held, name) for name in held._parameters}
        return _at({**slots, **{name: value_of(module) for name, module in held._modules.items()}}, key)
    if isinstance(held, dict):
        return _at({str(name): value_of(entry) for name, entry in held.items()}, key)
    if isinstance(held, (list, tuple)):
        return _at({str(place): value_of(entry) for place, entry in enumerate(held)}, key)
    return Value([thing])


def _at(held: dict[str, Value], key: Any) -> Value:
    if isinstance(key, int) and key < 0:
        key += len(held)
    if isinstance(key, (int, str)) and str(key) in held:
        return held[str(key)]
    return NOTHING.union(*held.values())
