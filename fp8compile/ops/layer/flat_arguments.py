"""The function of an op whose arguments depend on the placement: each field of it is an argument of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["flat"]


def flat(
    parameters: Sequence[inspect.Parameter], function: Callable[[tuple[Any, ...]], Any], returns: Any
) -> Callable[..., Any]:
    """Wrap a function of one tuple as a function of the entries, from whose signature a schema can be inferred.

    Args:
        parameters: The parameters, one for each entry.
        function: Takes the tuple.
        returns: Annotation of the result.
    """

    def wrapped(*args: Any) -> Any:
        return function(args)

    wrapped.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {**{each.name: each.annotation for each in parameters}, "return": returns}
    return wrapped
