"""Classes made at run time to replace a module's class; their instances can be copied and pickled."""

from __future__ import annotations

import copyreg
import operator
import types
from collections.abc import Callable
from typing import Any, ClassVar, SupportsIndex

__all__ = ["DynamicClass", "dynamic_class"]


class DynamicClass:
    """Base of classes that are made at run time from a user's class, to replace the class of an instance.

    Pickle can't find these classes by name, so pickles of instances name the function that makes the class.

    Attributes:
        made_by: The function that made the class, and its arguments: ``made_by[0](*made_by[1:])`` is the class.
    """

    made_by: ClassVar[tuple[Callable[..., type[Any]], Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing, so that the user's ``__init_subclass__``, which may register subclasses, is not called."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(max(operator.index(protocol), 2))
        function, arguments, *rest = reduced
        # the user's class defines how it is copied, or a user has subclassed the made class
        if function is not vars(copyreg)["__newobj__"] or "made_by" not in vars(type(self)):
            return (function, arguments, *rest)
        return (_new, (self.made_by, *arguments[1:]), *rest)


def _new(made_by: tuple[Any, ...], *arguments: Any) -> Any:
    """Make an empty instance of the class that ``made_by`` makes, for pickle and copy to fill."""
    function, *given = made_by
    cls = function(*given)
    return cls.__new__(cls, *arguments)


def dynamic_class(base: type[Any], plain: type[Any], made_by: tuple[Any, ...], **attributes: Any) -> type[Any]:
    """Make a subclass of ``base`` and ``plain``, with the name and docstring of ``plain``.

    ``made_by`` is (function, *arguments): a call that returns this class. ``attributes`` are set on the class.
    """
    named = {"__module__": base.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    names: dict[str, Any] = {**named, "made_by": made_by, **attributes}
    return types.new_class(plain.__name__, (base, plain), exec_body=lambda space: space.update(names))
