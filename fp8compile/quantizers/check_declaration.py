"""Checks of classes derived from `Constant`, each as early as Python allows; they raise TypeErrors.

class statement    types of fields, forbidden attributes, and methods overridden without their counterpart
first instance     the dataclass decorator, and annotations with names that are defined later in the module
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
import typing
from functools import cache
from typing import Any

import torch

__all__ = ["check_class", "check_decorated", "check_steps", "field_types", "fits"]

DECORATOR = "@dataclass(frozen=True, repr=False)"
PLAIN = (str, int, float, bool, type(None))
ALLOWED = (
    "a constant of a graph holds str, int, float, bool, None, tuples of them, and other constants such as quantizers. "
    "Name a dtype by a string; what changes from step to step belongs into a module's buffers, a process group to the "
    "tensor (fp8compile.quantize(x, quantizer, group=...))"
)
MUTABLE = (list, dict, set, bytearray, torch.Tensor)


def _names_of(cls: type[Any]) -> dict[str, Any]:
    """Return the names that a class's string annotations may use: from typing, its module, and the class itself."""
    module = sys.modules.get(cls.__module__)
    return {**vars(typing), **(vars(module) if module is not None else {}), cls.__name__: cls}


def _annotations(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations in a class's own body by field name, strings evaluated.

    A string that can't be evaluated is left out here, and checked when the first instance is made.
    """
    found = {}
    for name, hint in inspect.get_annotations(cls).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, _names_of(cls))  # like inspect.get_annotations, but one by one
            except Exception:  # the string names a function's locals, or imports for type checkers only
                continue
        found[name] = hint
    return found


def _refused(hint: Any, constant: type[Any]) -> Any:
    """Return the first part of a field's annotation that is not allowed; None if every part is allowed.

    Allowed are plain values, tuples of them and instances of ``constant``, the class `Constant`.
    """
    if hint in (None, Any, Ellipsis) or isinstance(hint, (typing.TypeVar, str)):
        return None
    if isinstance(hint, typing.NewType):
        return _refused(hint.__supertype__, constant)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, tuple):
        parts = (_refused(part, constant) for part in typing.get_args(hint) if part != ())
        return next((part for part in parts if part is not None), None)
    if origin in (typing.Annotated, typing.Final):
        return _refused(typing.get_args(hint)[0], constant)
    if origin is typing.Literal:
        return None
    fine = isinstance(hint, type) and origin is None and (hint is tuple or issubclass(hint, (*PLAIN, constant)))
    return None if fine else hint


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _default(value: Any) -> Any:
    if not isinstance(value, dataclasses.Field):
        return value
    factory = value.default_factory
    return factory() if factory in MUTABLE else value.default


def check_class(cls: type[Any], constant: type[Any]) -> None:
    """Raise a TypeError if ``cls``, a new constant, has a field, attribute or ``__post_init__`` that is not allowed.

    ``constant`` is the class `Constant`. A field may hold plain values, tuples and instances of ``constant``.
    """
    hints = _annotations(cls)
    for name, hint in hints.items():
        if hint is typing.ClassVar or typing.get_origin(hint) is typing.ClassVar:
            continue
        if isinstance(hint, dataclasses.InitVar) or hint is dataclasses.InitVar:
            raise TypeError(
                f"{cls.__name__}: {name} is an InitVar, which a value forgets; a graph could not rebuild it. Make it "
                "a field."
            )
        if (part := _refused(hint, constant)) is not None:
            raise TypeError(f"{cls.__name__}: field {name} is annotated as {_shown(part)}; {ALLOWED}.")
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        held = _default(value)
        if isinstance(held, (*MUTABLE, torch.distributed.ProcessGroup)) and not name.startswith("__"):
            what = "field" if name in annotated else "class attribute"
            raise TypeError(f"{cls.__name__}: {what} {name} holds a {type(held).__name__}; {ALLOWED}.")
        if isinstance(held, (*PLAIN, tuple, constant)) and name not in annotated and not name.startswith("_"):
            kind = type(held).__name__
            raise TypeError(
                f"{cls.__name__}: {name} = {held!r} has no annotation, which makes it an attribute of the class and "
                f"no field. Write {name}: {kind} = {held!r}, or {name}: ClassVar[{kind}] = {held!r} if it is the same "
                "for all instances."
            )
    post_init = vars(cls).get("__post_init__")
    if inspect.isfunction(post_init) and "__post_init__" not in post_init.__code__.co_names:
        raise TypeError(
            f"{cls.__name__}.__post_init__ leaves out the checks of the classes that it derives from. Write "
            "super().__post_init__() as its first line."
        )


@cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a class's fields by name, from the annotations in the class and its bases.

    A type is ``Any`` if the annotation of a class defined in a function can't be evaluated.

    Raises:
        TypeError: An annotation uses a name that its module does not have.
    """
    found = {}
    for base in reversed(cls.__mro__):
        hints, names = _annotations(base), [field.name for field in dataclasses.fields(cls)]
        for name, hint in inspect.get_annotations(base).items():
            if name not in names:
                continue
            if name not in hints and "<locals>" not in base.__qualname__:
                raise TypeError(
                    f"{base.__name__}: field {name} is annotated as {hint!r}, which names nothing in module "
                    f"{base.__module__}. Import it there, outside of `if TYPE_CHECKING:`, or mend the name."
                )
            found[name] = hints.get(name, Any)
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a field's value fits the annotation ``hint``; True for a hint that this function can't check."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in arguments)
    if origin in (typing.Annotated, typing.Final):
        return fits(value, arguments[0])
    if origin is typing.Literal:
        return value in arguments
    if isinstance(hint, typing.NewType):
        return fits(value, hint.__supertype__)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        parts = arguments[:1] * len(value) if arguments[1:] == (Ellipsis,) else arguments
        return len(parts) == len(value) and all(map(fits, value, parts))
    if hint is None:
        return value is None
    if hint is float:
        return isinstance(value, (float, int))
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


@cache
def check_decorated(cls: type[Any]) -> None:
    """Raise a TypeError unless the class is itself a frozen dataclass with generated equality over all fields."""
    name, parameters = cls.__name__, vars(cls).get("__dataclass_params__")
    if parameters is None:
        raise TypeError(f"{name} is no dataclass of its own: its fields would not count. Write {DECORATOR} above it.")
    if not parameters.frozen or not parameters.eq:
        raise TypeError(
            f"{name} is a dataclass with frozen={parameters.frozen}, eq={parameters.eq}. Write {DECORATOR}."
        )
    for field in dataclasses.fields(cls):
        if not (field.init and field.compare and field.hash in (None, True)):
            raise TypeError(
                f"{name}: field {field.name} has init={field.init}, compare={field.compare}, hash={field.hash}. Two "
                "values that differ in it would share a compiled graph, or a graph could not rebuild it: leave all "
                "three as they are by default."
            )


# pairs of a quantizer's methods: a class that overrides the first needs its own second, which returns the third
TOGETHER = (
    ("codes_shape", "values_shape", "the shape of a tensor from that of its codes"),
    ("codes_shape", "cast", "codes of that shape"),
    ("codes_shape", "dequantize", "values of such codes"),
    ("codes_shape", "transposed", "the quantizer of the transposed codes, packed along the other dim"),
    ("scale_dtype", "scale_of", "scales of that dtype"),
    ("scale_dtype", "scale_values", "stored scales as float32 numbers"),
    ("outer_scale", "block_scale", "stored scales of blocks from their amaxes and that of the whole tensor"),
    ("outer_scale", "block_multiplier", "what values are multiplied by, from both scales"),
    ("block_scale", "outer_scale", "the scale of a whole tensor from its amax"),
    ("scale_shape", "amax", "one amax an entry of that grid"),
    ("scale_shape", "cast", "codes, each by the multiplier of its entry of that grid"),
    ("scale_shape", "dequantize", "values, each by the scale of its entry of that grid"),
)


# pairs of methods, of which the second describes the first: a class that overrides the first needs the second anew
DECLARED = (
    ("dequantize", "gemm_format", "the float8 format in which a GEMM reads what this dequantize takes, or None"),
    ("scale_values", "stores_e8m0", "whether the scales that this scale_values takes are E8M0 bytes"),
)


def _overrides(cls: type[Any], base: type[Any], method: str) -> bool:
    return getattr(cls, method) is not getattr(base, method)


def _check_spelling(cls: type[Any], name: str, given: Any, methods: dict[str, Any]) -> None:
    """Raise a TypeError if a method misspells the name of a quantizer's step: nothing would call it.

    ``given`` is what the class has under ``name``; ``methods`` are the steps of `Quantizer` by name.
    """
    inherited = any(name in vars(parent) for parent in cls.__mro__[1:])
    if name.startswith("_") or inherited or not isinstance(given, (types.FunctionType, property)):
        return
    # 0.85 finds one added, missing or wrong letter in names of seven letters; "scale_values" is far from "scale_of"
    if close := difflib.get_close_matches(name, methods, n=1, cutoff=0.85):
        raise TypeError(
            f"{cls.__name__}.{name} is no step of a quantizer: did you mean {close[0]}? If it is a method of your "
            f"own, begin its name with an underscore: _{name}."
        )


def _check_together(cls: type[Any], base: type[Any]) -> None:
    """Raise a TypeError if ``cls`` overrides the first method of a pair in TOGETHER or DECLARED, not the second."""
    two_levels = _overrides(cls, base, "outer_scale")
    for first, second, what in TOGETHER:
        if two_levels and second == "scale_of":
            continue  # with two levels, block_scale makes the scales
        if _overrides(cls, base, first) and not _overrides(cls, base, second):
            raise TypeError(f"{cls.__name__} overrides {first} and not {second}. Write {second} too: {what}.")
    for first, second, what in DECLARED:
        if first in vars(cls) and second not in vars(cls) and _overrides(cls, base, second):
            raise TypeError(
                f"{cls.__name__} overrides {first}, and inherits a {second} that speaks of another {first}. Write "
                f"{second} too: {what}."
            )


def check_steps(cls: type[Any], base: type[Any]) -> None:
    """Raise a TypeError if a quantizer's class has no scale rule or overrides methods wrongly.

    Wrong are a missing counterpart, a misspelled name, a field in place of a method, and arguments other than in
    ``base``, the class `Quantizer`.
    """
    name = cls.__name__
    if not _overrides(cls, base, "multiplier") and not _overrides(cls, base, "outer_scale"):
        raise TypeError(
            f"{name} has no scale rule. Write\n    def multiplier(self, amax: Tensor) -> Tensor:\nwhich returns what "
            "the values of a block are multiplied by, from their largest magnitude; or derive from "
            f"fp8compile.CurrentScaling, which has one. (class {name}(Quantizer, abstract=True): a base of others.)"
        )
    _check_together(cls, base)
    methods = {method: step for method, step in vars(base).items() if inspect.isfunction(step) and method[0] != "_"}
    for method, given in {**inspect.get_annotations(cls), **vars(cls)}.items():
        if method not in methods:
            _check_spelling(cls, method, given, methods)
            continue
        parameters = inspect.signature(methods[method])
        annotated = method in inspect.get_annotations(cls)
        if annotated or not (callable(given) or isinstance(given, classmethod)):
            what = "a field" if annotated else f"a {type(given).__name__}"
            raise TypeError(
                f"{name}.{method} is {what}; it is a method: def {method}({', '.join(parameters.parameters)}). Give "
                "what is yours another name."
            )
        if not inspect.isfunction(given):
            continue
        try:
            inspect.signature(given).bind(*parameters.parameters)
        except TypeError as error:
            raise TypeError(
                f"{name}.{method} takes {inspect.signature(given)}: {error}. It is called as "
                f"{method}({', '.join(parameters.parameters)})."
            ) from None
