"""Gives an op one argument for each field of its placement, because PyTorch infers a schema from a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["flat"]


def flat(
    parameters: Sequence[inspect.Parameter], function: Callable[[tuple[Any, ...]], Any], returns: Any
) -> Callable[..., Any]:
    """Wrap a function of one tuple as a function that takes the entries as separate arguments.

    Args:
        parameters: The parameters of the result's signature, one for each entry of the tuple.
        function: Takes the tuple.
        returns: Annotation of the return value.
    """

    def wrapped(*args: Any) -> Any:
        return function(args)

    wrapped.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {**{each.name: each.annotation for each in parameters}, "return": returns}
    return wrapped
