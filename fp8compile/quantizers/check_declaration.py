"""Checks of classes derived from `Constant`, for what would otherwise be wrong in silence; they raise TypeErrors.

class statement    attributes that are no fields, and methods overridden without their counterpart
first instance     the dataclass decorator
each instance      values of fields, by `Constant` itself
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from functools import cache
from typing import Any

__all__ = ["check_class", "check_decorated", "check_steps"]

DECORATOR = "@dataclass(frozen=True, repr=False)"
METHODS = (types.FunctionType, property, classmethod, staticmethod, type)


def check_class(cls: type[Any]) -> None:
    """Raise a TypeError if a new constant has an attribute that is no field, or a ``__post_init__`` without checks."""
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        if name not in annotated and not name.startswith("_") and not isinstance(value, METHODS):
            kind = type(value).__name__
            raise TypeError(
                f"{cls.__name__}: {name} = {value!r} has no annotation, so it is a class attribute and not a field. "
                f"Write {name}: {kind}, or ClassVar[{kind}] if it is the same for all instances."
            )
    post_init = vars(cls).get("__post_init__")
    if inspect.isfunction(post_init) and "__post_init__" not in post_init.__code__.co_names:
        raise TypeError(
            f"{cls.__name__}.__post_init__ skips the checks of its base classes. Call super().__post_init__() in "
            "its first line."
        )


@cache
def check_decorated(cls: type[Any]) -> None:
    """Raise a TypeError unless the class is itself a frozen dataclass with generated equality over all fields."""
    name, parameters = cls.__name__, vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not parameters.eq:
        raise TypeError(f"{name} must be a frozen dataclass with equality. Write {DECORATOR} above it.")
    for field in dataclasses.fields(cls):
        if not (field.init and field.compare and field.hash in (None, True)):
            raise TypeError(
                f"{name}: field {field.name} has init={field.init}, compare={field.compare}, hash={field.hash}. Two "
                "values that differ only in this field would share a compiled graph, or a graph could not recreate "
                "it. Use the default for all three."
            )


# a quantizer's method, and those that a class which overrides it needs too
TOGETHER = {
    "codes_shape": ("values_shape", "cast", "dequantize", "transposed"),
    "scale_dtype": ("scale_of", "scale_values"),
    "outer_scale": ("block_scale", "block_multiplier"),
    "block_scale": ("outer_scale",),
    "scale_shape": ("amax", "cast", "dequantize"),
}
# a method, and the one that describes it to GEMMs: a class that overrides the first needs the second anew
DECLARED = {"dequantize": "gemm_format", "scale_values": "stores_e8m0"}


def _overrides(cls: type[Any], base: type[Any], method: str) -> bool:
    return getattr(cls, method) is not getattr(base, method)


def _check_together(cls: type[Any], base: type[Any]) -> None:
    two_levels = _overrides(cls, base, "outer_scale")  # then block_scale makes the scales
    for first, others in TOGETHER.items():
        for second in others if _overrides(cls, base, first) else ():
            if not _overrides(cls, base, second) and not (two_levels and second == "scale_of"):
                raise TypeError(f"{cls.__name__} overrides {first} but not {second}. Override {second} too.")
    for first, second in DECLARED.items():
        if first in vars(cls) and second not in vars(cls) and _overrides(cls, base, second):
            raise TypeError(f"{cls.__name__} overrides {first} but inherits another {second}. Override {second} too.")


def check_steps(cls: type[Any], base: type[Any]) -> None:
    """Raise a TypeError if a quantizer's class has no scale rule or overrides methods of ``base`` wrongly.

    ``base`` is the class `Quantizer`. Wrong are a missing counterpart, a misspelled name, and other arguments.
    """
    name = cls.__name__
    if not _overrides(cls, base, "multiplier") and not _overrides(cls, base, "outer_scale"):
        raise TypeError(
            f"{name} has no scale rule. Define\n    def multiplier(self, amax: Tensor) -> Tensor:\n"
            "which returns the factor for the values of a block, given their largest magnitude; or derive from "
            f"fp8compile.CurrentScaling, which has one. (To define a base class, write class {name}(Quantizer, "
            "abstract=True).)"
        )
    _check_together(cls, base)
    methods = {method: step for method, step in vars(base).items() if inspect.isfunction(step) and method[0] != "_"}
    for method, given in {**inspect.get_annotations(cls), **vars(cls)}.items():
        if method in methods:
            parameters = ", ".join(inspect.signature(methods[method]).parameters)
            if not (inspect.isfunction(given) or isinstance(given, classmethod)):
                raise TypeError(f"{name}.{method} must be a method, because it is called as {method}({parameters}).")
            signature = inspect.signature(getattr(given, "__func__", given))  # type: ignore[arg-type]
            try:
                signature.bind(*parameters.split(", "))
            except TypeError as error:
                raise TypeError(
                    f"{name}.{method} takes {signature}: {error}. It is called as {method}({parameters})."
                ) from None
        elif inspect.isfunction(given) and not any(method in vars(parent) for parent in cls.__mro__[1:]):
            # 0.85 finds one added, missing or wrong letter; a leading underscore keeps a method of one's own apart
            close = () if method[0] == "_" else difflib.get_close_matches(method, methods, n=1, cutoff=0.85)
            if close:
                raise TypeError(
                    f"{name}.{method} is not a step of a quantizer. Did you mean {close[0]}? If it is a method of "
                    f"your own, start its name with an underscore: _{method}."
                )
