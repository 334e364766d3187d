"""Arguments of earlier versions, which a later version will not accept: each call warns, with the new spelling."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["accept_lifetime_flags", "lifetime_of_flags"]

P = ParamSpec("P")
R = TypeVar("R")

BEFORE = {  # flag -> the lifetime that True and False stand for
    "keep_weight_codes": ("pass", "call"),
    "cache_weights": ("step", None),
    "quantized_parameters": ("parameter", None),
}


def lifetime_of_flags(options: Mapping[str, Any], *, warn: bool = False) -> dict[str, Any]:
    """Return options, or fields of a recipe, in which ``weight_lifetime`` replaces the flags of earlier versions."""
    found = {name: each for name, each in options.items() if name not in BEFORE}
    for name in [flag for flag in BEFORE if flag in options]:
        given = f"{name}={options[name]!r}"
        if type(options[name]) is not bool or options.get("weight_lifetime") is not None:
            raise TypeError(f"`{name}` was replaced by `weight_lifetime`; got {given}. Pass weight_lifetime alone.")
        lifetime = BEFORE[name][0 if options[name] else 1]
        if lifetime is not None:
            found["weight_lifetime"] = lifetime
        if warn:
            new = "Omit it" if lifetime is None else f"Pass weight_lifetime={lifetime!r} instead"
            warnings.warn(f"{given} was replaced, and will raise an error. {new}.", FutureWarning, stacklevel=3)
    return found


def accept_lifetime_flags(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` accept the flags that ``weight_lifetime`` replaced."""

    @wraps(function)
    def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
        given = lifetime_of_flags(kwargs, warn=True) if any(name in BEFORE for name in kwargs) else kwargs
        return function(*args, **given)

    return accepting
