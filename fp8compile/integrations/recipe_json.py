"""Conversion of recipes to and from JSON, for the configuration files of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fp8compile.quantizers import CurrentScaling, DelayedScaling, Recipe, TwoLevelScaling, lifetime_of_flags
from fp8compile.quantizers.constant import Constant
from fp8compile.recipes import by_name

__all__ = ["recipe_from_json", "recipe_to_json"]

OURS = Recipe, CurrentScaling, DelayedScaling, TwoLevelScaling
CLASSES: dict[str, type[Any]] = {each.__name__: each for each in OURS}
CLASS = "class"  # the key of a constant's class


def _to_json(value: Any) -> Any:
    if not isinstance(value, Constant):
        return list(value) if isinstance(value, tuple) else value
    name = type(value).__name__
    if CLASSES.get(name) is not type(value):
        raise TypeError(
            f"{name} can't be written as JSON; only recipes of {', '.join(CLASSES)} can. Convert the model with "
            "fp8compile.convert after from_pretrained."
        )
    return {CLASS: name, **{each.name: _to_json(getattr(value, each.name)) for each in fields(value)}}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, Mapping):
        return value
    name = value.get(CLASS)
    if name not in CLASSES:
        raise ValueError(
            f"a recipe in JSON has the class {name!r}; it must be one of {', '.join(CLASSES)}. Was it written by "
            "another version of fp8compile?"
        )
    given = lifetime_of_flags({key: _from_json(each) for key, each in value.items() if key != CLASS})
    known = [each.name for each in fields(CLASSES[name])]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(
            f"a {name} in JSON has the unknown fields {', '.join(unknown)}; the class has {', '.join(known)}. Was "
            "it written by another version of fp8compile?"
        )
    return CLASSES[name](**given)


def recipe_to_json(recipe: Any) -> Any:
    """Convert a recipe, or a mapping from name patterns to recipes, to JSON-serializable values.

    Raises:
        TypeError: A quantizer is not a ``CurrentScaling``, ``DelayedScaling`` or ``TwoLevelScaling``.
    """
    if isinstance(recipe, Mapping):  # a list, because the first pattern that matches decides, and files sort keys
        return [[name, recipe_to_json(each)] for name, each in recipe.items()]
    return _to_json(recipe)


def recipe_from_json(given: Any) -> Any:
    """Create a recipe, or a mapping to recipes, from the result of `recipe_to_json` or from a recipe's name.

    Raises:
        ValueError: No recipe has this name, or a class or field is not known.
    """
    if isinstance(given, str):
        return by_name(given)
    if isinstance(given, list) or (isinstance(given, Mapping) and CLASS not in given):
        return {name: recipe_from_json(each) for name, each in dict(given).items()}
    return _from_json(given)
