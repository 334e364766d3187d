"""Copies of torchtitan configs whose ``build`` also changes the object that it makes.

The copy's class derives from the config's class, so that type checks still work.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, Protocol

import tyro

__all__ = ["Change", "building"]


class Change(Protocol):
    """Protocol of a hashable value that changes what a torchtitan config builds."""

    def build(self, plain: type[Any], config: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``plain.build(config, **kwargs)``, change the result, and return it.

        ``plain`` is the class of the original config.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, for logs of the config."""


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
    """Return a copy of a config. The copy's ``build`` also applies ``change``, which is its field ``float8``."""
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
    return _class(type(config))(**given, float8=change)  # type: ignore[arg-type]  # classes are hashable
