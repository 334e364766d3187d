"""Recipes and quantizers that installed packages offer by entry points of ``fp8compile.quantizers``.

An entry point names a quantizer, a recipe, or a class or function that returns one when called without arguments. A
package is imported only when its entry point's name is looked up.
"""

from __future__ import annotations

from importlib import metadata

from fp8compile._compat import constant_when_traced
from fp8compile.quantizers.quantizer import Quantizer
from fp8compile.quantizers.recipe import Recipe

__all__ = ["GROUP", "LOADED", "installed", "load", "source"]

GROUP = "fp8compile.quantizers"
LOADED: dict[str, Quantizer | Recipe] = {}  # the values that `load` has returned, by name


def _source(entry: metadata.EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
    return f"entry point {entry.name} = {entry.value} of {distribution}"


def _entries() -> dict[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ValueError(
                f"two packages define a quantizer named {entry.name!r}: {_source(other)}, and {_source(entry)}. "
                "Uninstall one of them."
            )
    return found


def source(name: str) -> str:
    """Return a description of the entry point ``name``, with its value and its package, as text for an error."""
    return _source(_entries()[name])


@constant_when_traced
def installed() -> tuple[str, ...]:
    """Return the sorted names of the entry points of installed packages. No package is imported.

    Raises:
        ValueError: Two packages use one name for different things.
    """
    return tuple(sorted(_entries()))


@constant_when_traced
def load(name: str) -> Quantizer | Recipe:
    """Load the recipe or quantizer that a package offers under ``name``.

    Raises:
        KeyError: No package has an entry point of this name.
        ValueError: Two packages use one name for different things.
        ImportError: The entry point can't be imported or called; the cause is chained.
        TypeError: The entry point's value is neither a quantizer nor a recipe.
    """
    entry = _entries()[name]
    try:
        found = entry.load()
        value = found() if callable(found) else found
    except Exception as error:
        raise ImportError(
            f"{_source(entry)} can't be used: {type(error).__name__}: {error}. Update or uninstall "
            f"{entry.dist.name if entry.dist is not None else 'that package'}."
        ) from error
    if not isinstance(value, (Quantizer, Recipe)):
        raise TypeError(
            f"{_source(entry)} is {value!r}; it must be a fp8compile.Quantizer, a fp8compile.Recipe, or a class or "
            "function that returns one when called without arguments."
        )
    LOADED[name] = value
    return value
