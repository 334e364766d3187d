"""The class of a converted linear: `Linear`, or a class derived from a user's subclass and `Linear`."""

from __future__ import annotations

from functools import cache

from torch import nn

from fp8compile.nn.dynamic_classes import DynamicClass, dynamic_class
from fp8compile.nn.layer.linear import Linear

__all__ = ["float8_class", "names_taken"]

# attributes that a Linear has and a nn.Linear has not
MIXINS = Linear.__mro__[: Linear.__mro__.index(nn.Linear)]
OWN_NAMES = frozenset().union(*map(vars, MIXINS)) - {*dir(nn.Linear), "__annotations__", "__prepare_scriptable__"}


class _ConvertedSubclass(DynamicClass, Linear):
    """Base of the FP8 classes that `float8_class` makes for users' subclasses of ``nn.Linear``."""


@cache
def float8_class(plain: type[nn.Linear]) -> type[Linear]:
    """Return the class that a layer of class ``plain`` gets when it is converted.

    ``plain`` is ``nn.Linear``, or a subclass that inherits its forward.
    """
    if plain is nn.Linear:
        return Linear
    return dynamic_class(_ConvertedSubclass, plain, (float8_class, plain), _plain=plain)


def names_taken(module: nn.Linear) -> list[str]:
    """Return names of `Linear`'s attributes that ``module`` or its class uses for something else."""
    classes = type(module).__mro__
    own = set(vars(module)).union(*map(vars, classes[: classes.index(nn.Linear)]))
    return sorted(OWN_NAMES & own)
