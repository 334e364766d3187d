"""Classes made at run time for existing modules, whose instances can be copied and pickled."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable
from typing import Any, ClassVar, SupportsIndex

__all__ = ["MadeClass"]


class MadeClass:
    """Base of a class that a function made from a user's class, to replace that class in an instance.

    Such a class has no name that pickle could find it by. Its instances name the function instead.

    Attributes:
        made_by: The function and its arguments, of the class itself: ``made_by[0](*made_by[1:])`` is the class.
    """

    made_by: ClassVar[tuple[Callable[..., type[Any]], Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the user's own hook, because a class that registers its subclasses would find one that nobody wrote."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(max(operator.index(protocol), 2))
        function, arguments, *rest = reduced
        # somebody's class says itself how it is copied, or stands above this one
        if function is not vars(copyreg)["__newobj__"] or "made_by" not in vars(type(self)):
            return (function, arguments, *rest)
        return (_new, (self.made_by, *arguments[1:]), *rest)


def _new(made_by: tuple[Any, ...], *arguments: Any) -> Any:
    """Make an empty instance, which pickle and copy fill."""
    function, *given = made_by
    cls = function(*given)
    return cls.__new__(cls, *arguments)
