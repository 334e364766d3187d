"""Converter for torchtitan's model configs: applies `fp8compile.convert` to the built model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.module import Module

from fp8compile.integrations.torchtitan.built import building
from fp8compile.integrations.torchtitan.states import declare_states
from fp8compile.nn import convert
from fp8compile.nn.convertible.assign_recipes import Recipes
from fp8compile.nn.convertible.filters import Filter
from fp8compile.quantizers import Recipe
from fp8compile.recipes import describe

__all__ = ["Float8Converter"]


def _shown(recipe: Recipes) -> Any:
    if isinstance(recipe, Recipe):
        return describe(recipe)
    return (
        {name: each and describe(each) for name, each in recipe.items()}
        if isinstance(recipe, Mapping)
        else str(recipe)
    )


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    """Change of a model's config: ``build`` also converts the built model, which is on torchtitan's meta device."""

    recipe: Recipes
    filter: Filter | None
    keep_ends: int

    def build(self, plain: type[Any], config: Any, kwargs: dict[str, Any]) -> nn.Module:
        model = plain.build(config, **kwargs)
        convert(model, self.recipe, filter=self.filter, keep_ends=self.keep_ends)
        declare_states(model)
        return model

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": _shown(self.recipe), "filter": str(self.filter), "keep_ends": self.keep_ends}


class Float8Converter(QuantizationConverter):
    """FP8 quantization converter for the list ``converters`` in torchtitan's model registries.

    When the model is built, `fp8compile.convert` converts its linear layers and experts to FP8. Routers stay in high
    precision. ``fp8compile.conversion_report`` lists layers that were not converted, with reasons.

    `fp8compile.integrations.torchtitan.convert` uses this converter, and also changes other parts of the
    ``Trainer.Config``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Arguments of `fp8compile.convert`.

        Attributes:
            recipe: A recipe, a recipe for each name pattern, or a function ``(module, fqn) -> Recipe``.
            filter: Which layers to convert, as name patterns or a function; None excludes layers that are too small to
                benefit from FP8.
            keep_ends: Number of blocks at each end of the model to leave in high precision.
        """

        recipe: Recipes
        filter: Filter | None = None
        keep_ends: int = 0

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Return a copy of a model's config that builds the model in FP8."""
        own = self.config
        return building(model_config, _Conversion(recipe=own.recipe, filter=own.filter, keep_ends=own.keep_ends))
