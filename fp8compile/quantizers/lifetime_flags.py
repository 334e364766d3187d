"""Arguments of earlier versions: calls raise or warn with the new spelling; files still load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["accept_lifetime_flags", "lifetime_of_flags", "replace_lifetime_flags"]

P = ParamSpec("P")
R = TypeVar("R")

BEFORE = {  # flag -> the lifetime that True and False stand for
    "keep_weight_codes": ("pass", "call"),
    "cache_weights": ("step", None),
    "quantized_parameters": ("parameter", None),
}
FLAGS = frozenset(BEFORE)


def lifetime_of_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, or fields of a recipe, in which ``weight_lifetime`` replaces the flags of earlier versions."""
    found = {name: each for name, each in options.items() if name not in BEFORE}
    for name in [flag for flag in BEFORE if flag in options]:
        if type(options[name]) is not bool or options.get("weight_lifetime") is not None:
            given = f"`{name}` was replaced by `weight_lifetime`; got {name}={options[name]!r}"
            raise TypeError(f"{given}. Pass weight_lifetime alone.")
        if (lifetime := BEFORE[name][not options[name]]) is not None:
            found["weight_lifetime"] = lifetime
    return found


def replace_lifetime_flags(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `lifetime_of_flags` does; warn for each flag, or raise a TypeError if no release had it."""
    found = lifetime_of_flags(options)
    for name in [flag for flag in BEFORE if flag in options]:
        lifetime = BEFORE[name][not options[name]]
        new = "Omit it" if lifetime is None else f"Pass weight_lifetime={lifetime!r} instead"
        text = f"{name}={options[name]!r} was replaced"
        if name == "cache_weights":
            raise TypeError(f"{text} by `weight_lifetime`. {new}.")
        warnings.warn(f"{text}, and will raise an error. {new}.", FutureWarning, stacklevel=3)
    return found


def accept_lifetime_flags(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` accept the flags that ``weight_lifetime`` replaced, as `replace_lifetime_flags` does."""

    @wraps(function)
    def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **(kwargs if FLAGS.isdisjoint(kwargs) else replace_lifetime_flags(kwargs)))

    return accepting
