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

from fp8compile.nn.convertible_layers import is_layer, layers
from fp8compile.nn.filters import check_pattern_matches
from fp8compile.nn.functional import check_recipe
from fp8compile.quantizers import Recipe
from fp8compile.tensor import shown

__all__ = ["Recipes", "assigner", "ends", "with_tail"]

Recipes = Recipe | Mapping[str, Recipe | None] | Callable[[nn.Module, str], Recipe | None]
Assigner = Callable[[nn.Module, list[str]], Recipe | None]


def _by_pattern(recipes: Mapping[str, Recipe | None], fqns: list[str]) -> Assigner:
    for pattern, recipe in recipes.items():
        if not isinstance(pattern, str):
            raise TypeError(f"convert: a key of recipe is {shown(pattern)}; it is a name pattern such as 'layers.*'.")
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
            f"convert: recipe is {shown(function)}, a function that does not take (module, fqn). It is a recipe, such "
            "as fp8compile.recipes.rowwise(), a mapping from name patterns to recipes, or such a function."
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


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the entries of the ``ModuleList`` or ``Sequential`` with the most layers; [] if the model has none.

    Only entries with layers count, and a container needs at least two of them.
    """

    def count(module: nn.Module) -> int:
        return sum(map(is_layer, module.modules()))

    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    stacks = [[entry for entry in entries if count(entry)] for entries in lists]
    # max takes the first of equals, which is the outermost
    return max((stack for stack in stacks if len(stack) > 1), key=lambda stack: sum(map(count, stack)), default=[])


def with_tail(model: nn.Module, recipe: Recipes, share: float, tail_recipe: Recipe | None) -> Recipes:
    """Return ``recipe``, changed so that the last blocks and all layers after them get ``tail_recipe``.

    ``share`` is the fraction of all blocks that get ``tail_recipe``, rounded up to whole blocks; 0 returns ``recipe``
    unchanged. ``tail_recipe=None`` leaves these layers in high precision.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"convert: tail is {share!r}; it is the share of the last blocks, a number from 0 to 1.")
    if share == 0:
        if tail_recipe is not None:
            raise ValueError("convert: tail_recipe is given and tail is 0; say how many blocks it is for, tail=0.15.")
        return recipe
    if tail_recipe is not None:
        check_recipe("convert", tail_recipe)
    every = [(name, module) for name, module in model.named_modules() if is_layer(module)]
    if not every:
        return recipe  # convert raises because there are no layers
    blocks = _blocks(model) or [module for _, module in every]
    count = max(1, math.ceil(round(share * len(blocks), 9)))  # 0.07 * 100 is 7.000000000000001
    first = {module for block in blocks[: len(blocks) - count] for module in block.modules()}
    stack = {module for block in blocks for module in block.modules()}
    start = next(place for place, (_, module) in enumerate(every) if module in stack)
    tail = {module for _, module in every[start:]} - first
    names = dict(layers(model))
    assign = assigner(recipe, [name for each in names.values() for name in each])
    return lambda module, _: tail_recipe if module in tail else assign(module, names[module])


def ends(model: nn.Module, count: int) -> set[nn.Module]:
    """Return the layers in the first and last ``count`` blocks, and all layers before the first or after the last one.

    If the model has no blocks, each layer counts as a block. If ``count`` is 0, no layer is returned.
    """
    if type(count) is not int or count < 0:
        raise ValueError(f"convert: keep_ends is {count!r}; it is how many blocks at each end stay as they are.")
    if count == 0:
        return set()
    every = [module for module in model.modules() if is_layer(module)]
    blocks = _blocks(model) or every
    stack, inner = ({m for block in part for m in block.modules()} for part in (blocks, blocks[count:-count]))
    places = [place for place, module in enumerate(every) if module in stack]
    between = set(every[places[0] : places[-1] + 1]) - stack  # neither before nor after the blocks
    return set(every) - inner - between
