"""Classes that are made while a program runs, for modules that exist: their instances are copied and pickled."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["MadeClass"]


class MadeClass:
    """Base of a class that a function made of somebody's class, to take its place in an instance.

    Such a class has no name that pickle could find it by. Its instances name the function instead.

    Attributes:
        made_by: The function and its arguments, of the class itself: ``made_by[0](*made_by[1:])`` is the class.
    """

    made_by: ClassVar[tuple[Callable[..., type], Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Somebody's class isn't told: one that registers its subclasses would find one that nobody wrote."""

    def __reduce_ex__(self, protocol: int) -> Any:
        function, arguments, *rest = super().__reduce_ex__(max(protocol, 2))
        # somebody's class says itself how it is copied, or stands above this one
        if function is not copyreg.__newobj__ or "made_by" not in vars(type(self)):
            return (function, arguments, *rest)
        return (_new, (self.made_by, *arguments[1:]), *rest)


def _new(made_by: tuple, *arguments: Any) -> Any:
    """An empty instance: pickle and copy fill it."""
    function, *given = made_by
    cls = function(*given)
    return cls.__new__(cls, *arguments)
