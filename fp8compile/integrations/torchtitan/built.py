"""Config classes that build the same object as another config, and then change it.

A torchtitan config builds the class that it is nested in, and so does a subclass of the config. So code that checks
the type of a config, or of the object that it builds, sees no difference.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, Protocol

import tyro

__all__ = ["Change", "building"]


class Change(Protocol):
    """A change that is made to a built object. Implementations are hashable; logs of the config show ``to_dict()``."""

    def build(self, plain: type[Any], config: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``plain.build(config, **kwargs)``, and change the result."""

    def to_dict(self) -> dict[str, Any]:
        """The change as plain values, for logs."""


@cache
def _class(plain: type[Any]) -> type[Any]:
    def build(self: Any, **kwargs: Any) -> Any:
        return self.float8.build(plain, self, kwargs)

    added = [("float8", Annotated[Any, tyro.conf.Suppress], field(kw_only=True))]  # no option of a command line
    space = {"build": build, "__module__": plain.__module__, "__doc__": plain.__doc__}
    made = make_dataclass(plain.__name__, added, bases=(plain,), namespace=space, kw_only=True, slots=True)
    made.__qualname__ = plain.__qualname__
    return made


def building(config: Any, change: Change) -> Any:
    """A copy of a config whose ``build`` also makes a change.

    Args:
        config: A ``Configurable.Config`` of torchtitan.
        change: The change, whose ``build`` is called. The copy keeps it in the field ``float8``.
    """
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
    return _class(type(config))(**given, float8=change)  # type: ignore[arg-type]  # classes are hashable
