"""replaced_arguments: a call with an argument of an earlier version raises an error with the new spelling."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["LIFETIME_ARGUMENTS", "replaced_arguments"]

P = ParamSpec("P")
R = TypeVar("R")

LIFETIME_ARGUMENTS = {
    "cache_weights": "weight_lifetime='step'",
    "keep_weight_codes": "weight_lifetime='pass'",
    "quantized_parameters": "weight_lifetime='parameter'",
}


def replaced_arguments(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator whose functions raise a TypeError for the arguments named here, with what replaces them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, new in instead.items():
                if name in kwargs:
                    raise TypeError(f"{function.__name__}: `{name}` was replaced. Pass {new} instead of {name}=True.")
            return function(*args, **kwargs)

        return checked

    return decorate
