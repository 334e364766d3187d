"""The class of a converted layer: `Linear`, or for a subclass of ``nn.Linear`` one that is both."""

from __future__ import annotations

import copyreg
import types
from functools import cache
from typing import Any

from torch import nn

from fp8compile.nn.linear import Linear

__all__ = ["float8_class", "names_taken"]

# what a Linear has that a nn.Linear hasn't
OWN_NAMES = frozenset(vars(Linear)) - frozenset(dir(nn.Linear)) - {"__annotations__", "__prepare_scriptable__"}


class _ConvertedSubclass(Linear):
    """A class that `float8_class` made: its methods are those of the subclass, its forward is in FP8."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The subclass isn't told: one that registers or checks its subclasses would find one that nobody wrote."""

    def __reduce_ex__(self, protocol: int) -> Any:
        function, arguments, *rest = super().__reduce_ex__(max(protocol, 2))
        # the subclass says itself how it is copied, or somebody's class stands above this one
        if function is not copyreg.__newobj__ or "_plain" not in vars(type(self)):
            return (function, arguments, *rest)
        return (_new, (self._plain, *arguments[1:]), *rest)  # the class has no name that pickle could find it by


def _new(plain: type[nn.Linear], *arguments: Any) -> Linear:
    """An empty layer: pickle and copy fill it."""
    cls = float8_class(plain)
    return cls.__new__(cls, *arguments)


@cache
def float8_class(plain: type[nn.Linear]) -> type[Linear]:
    """The class that layers of a class get when they are converted.

    Args:
        plain: ``nn.Linear``, or a subclass that inherits its forward.
    """
    if plain is nn.Linear:
        return Linear
    names = {"__module__": __name__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__, "_plain": plain}
    return types.new_class(plain.__name__, (_ConvertedSubclass, plain), exec_body=lambda space: space.update(names))


def names_taken(module: nn.Linear) -> list[str]:
    """Names that a module or its class use for something else than a `Linear` does."""
    classes = type(module).__mro__
    own = set(vars(module)).union(*map(vars, classes[: classes.index(nn.Linear)]))
    return sorted(OWN_NAMES & own)
