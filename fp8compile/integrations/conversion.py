"""Conversion of a model for trainers, with FP8 all-gather if FSDP2 will shard it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8compile.nn import convert
from fp8compile.nn.convertible.assign_recipes import Recipes
from fp8compile.nn.weights.quantize_weights import makes_parameters
from fp8compile.parallel import fsdp_float8_all_gather
from fp8compile.quantizers import PARAMETER, Recipe, lifetime_of_flags

__all__ = ["Conversion"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Arguments of a conversion, and whether FSDP2 all-gathers weights in FP8.

    Attributes:
        recipe: The recipe, as for `fp8compile.convert`.
        gather: Whether FSDP2, if it shards the model, all-gathers weights in FP8.
        options: Other arguments of `fp8compile.convert`.
    """

    recipe: Recipes
    gather: bool
    options: Mapping[str, Any]

    def replaces_parameters(self, *, sharded: bool) -> bool:
        """Whether conversion creates new parameters, which an existing optimizer would not update.

        ``sharded`` is whether FSDP2 will shard the model.
        """
        return self.makes_parameters() or (sharded and self.gather)

    def makes_parameters(self) -> bool:
        """Whether conversion creates FP8 parameters; False if a function chooses recipes, which is not called here."""
        if (lifetime := lifetime_of_flags(self.options).get("weight_lifetime")) is not None:
            return lifetime == PARAMETER
        given = self.recipe.values() if isinstance(self.recipe, Mapping) else (self.recipe,)
        recipes = [each for each in (*given, self.options.get("tail_recipe")) if isinstance(each, Recipe)]
        return any(map(makes_parameters, recipes))

    def apply(self, model: nn.Module, *, sharded: bool, checkpointed: bool) -> nn.Module:
        """Convert a model in place and return it; it must be neither compiled nor sharded yet.

        ``sharded`` is whether FSDP2 will shard the model, ``checkpointed`` whether the backward recomputes forwards.
        """
        convert(model, self.recipe, **self.options)
        if sharded and self.gather:
            fsdp_float8_all_gather(model, checkpointed=checkpointed)
        return model
