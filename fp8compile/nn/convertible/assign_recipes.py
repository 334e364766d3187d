"""Decide each layer's recipe when a model is converted.

The caller gives one recipe for all layers, a mapping from name patterns to recipes, or a function. Patterns are
fnmatch's (``*`` matches dots too), and the first pattern that matches a name decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fp8compile.nn.convertible.convertible_layers import is_layer, layers
from fp8compile.nn.convertible.filters import check_pattern_matches
from fp8compile.nn.layer.functional import check_recipe
from fp8compile.quantizers import Recipe
from fp8compile.tensor import shown

__all__ = ["Recipes", "assigner", "ends", "with_tail"]

Recipes = Recipe | Mapping[str, Recipe | None] | Callable[[nn.Module, str], Recipe | None]
Assigner = Callable[[nn.Module, list[str]], Recipe | None]


def _by_pattern(recipes: Mapping[str, Recipe | None], fqns: list[str]) -> Assigner:
    for pattern, recipe in recipes.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"convert: a key of `recipe` is {shown(pattern)}; it must be a string pattern, such as 'layers.*'."
            )
        if recipe is not None:
            check_recipe(f"convert: {pattern!r}", recipe)
        check_pattern_matches(pattern, fqns, given=pattern)

    def assign(module: nn.Module, names: list[str]) -> Recipe | None:
        matching = (recipe for pattern, recipe in recipes.items() if any(fnmatchcase(fqn, pattern) for fqn in names))
        return next(matching, None)

    return assign


def _by_function(function: Callable[[nn.Module, str], Recipe | None]) -> Assigner:
    try:
        inspect.signature(function).bind(None, "")
    except TypeError as error:  # for example recipes.rowwise without parentheses
        raise TypeError(
            f"convert: `recipe` is {shown(function)}, a function that does not accept (module, fqn). It must be a "
            "recipe such as fp8compile.recipes.rowwise(), a mapping from name patterns to recipes, or a function "
            "of (module, fqn)."
        ) from error
    except ValueError:
        pass  # builtins have no signature

    def assign(module: nn.Module, names: list[str]) -> Recipe | None:
        recipe = function(module, names[0])
        if recipe is not None:
            check_recipe(f"convert: for {names[0]!r}", recipe)
        return recipe

    return assign


def assigner(recipe: Recipes, fqns: list[str]) -> Assigner:
    """Make a function that maps a layer and the layer's names to a recipe, or to None for high precision.

    ``recipe`` is the argument of `convert`; each of its patterns must match one of ``fqns``, the names of all layers.
    """
    if isinstance(recipe, Mapping):
        return _by_pattern(recipe, fqns)
    if callable(recipe) and not isinstance(recipe, (Recipe, type)):
        return _by_function(recipe)
    check_recipe("convert", recipe)
    one: Any = recipe
    return lambda module, names: one


def _stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of blocks: the outermost ``ModuleList`` and ``Sequential`` of at least two entries with layers.

    Lists whose entries have one layer each, such as a projector or several heads, count only if there are no others;
    without any list, each layer of the model is a block.
    """

    def count(module: nn.Module) -> int:
        return sum(map(is_layer, module.modules()))

    stacks: list[list[nn.Module]] = []
    within: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module not in within:
            stack = [entry for entry in module if count(entry)]
            if len(stack) > 1:
                stacks.append(stack)
                within.update(*(block.modules() for block in stack))
    of_blocks = [stack for stack in stacks if sum(map(count, stack)) > len(stack)]
    return of_blocks or stacks or [[module for module in model.modules() if is_layer(module)]]


def with_tail(model: nn.Module, recipe: Recipes, share: float, tail_recipe: Recipe | None) -> Recipes:
    """Return ``recipe``, changed so that the last blocks and all layers after them get ``tail_recipe``.

    ``share`` is the fraction of all blocks that get ``tail_recipe``, rounded up to whole blocks; 0 returns ``recipe``
    unchanged. ``tail_recipe=None`` leaves these layers in high precision.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(
            f"convert: `tail` is {share!r}; it must be a number from 0 to 1, the fraction of blocks at the end that "
            "use tail_recipe."
        )
    if share == 0:
        if tail_recipe is not None:
            raise ValueError("convert: `tail_recipe` requires the fraction of blocks that use it, such as tail=0.15.")
        return recipe
    if tail_recipe is not None:
        check_recipe("convert", tail_recipe)
    every = [(name, module) for name, module in model.named_modules() if is_layer(module)]
    if not every:
        return recipe  # convert raises because there are no layers
    blocks = [block for stack in _stacks(model) for block in stack]
    count = max(1, math.ceil(round(share * len(blocks), 9)))  # 0.07 * 100 is 7.000000000000001
    first, last = (
        {module for block in part for module in block.modules()} for part in (blocks[:-count], blocks[-count:])
    )
    start = next((place for place, (_, module) in enumerate(every) if module in last - first), len(every))
    tail = {module for _, module in every[start:]} - first
    names = dict(layers(model))
    assign = assigner(recipe, [name for each in names.values() for name in each])
    return lambda module, _: tail_recipe if module in tail else assign(module, names[module])


def ends(model: nn.Module, count: int) -> set[nn.Module]:
    """Return the layers in the first and last ``count`` blocks of each list of blocks, and those outside of all lists.

    If ``count`` is 0, no layer is returned.
    """
    if type(count) is not int or count < 0:
        raise ValueError(
            f"convert: `keep_ends` is {count!r}; it must be an int of at least 0, the number of blocks at each end "
            "that stay in high precision."
        )
    if count == 0:
        return set()
    inner = {module for stack in _stacks(model) for block in stack[count:-count] for module in block.modules()}
    return {module for module in model.modules() if is_layer(module)} - inner
