"""Converts a model and, if FSDP2 will shard it, lets FSDP2 gather codes; for the integrations with trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8compile.nn import convert
from fp8compile.nn.assign_recipes import Recipes
from fp8compile.parallel import fsdp_float8_all_gather

__all__ = ["Conversion"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Arguments of a conversion, and whether FSDP2 gathers FP8 weights as codes.

    Attributes:
        recipe: The recipe, as `fp8compile.convert` takes it.
        gather: Whether FSDP2, if it shards the model, gathers FP8 weights as codes.
        options: Other arguments of `fp8compile.convert`.
    """

    recipe: Recipes
    gather: bool
    options: Mapping[str, Any]

    def replaces_parameters(self, *, sharded: bool) -> bool:
        """Whether conversion makes new parameters, which an earlier optimizer would not update.

        ``sharded`` tells whether FSDP2 will shard the model.
        """
        return bool(self.options.get("quantized_parameters")) or (sharded and self.gather)

    def apply(self, model: nn.Module, *, sharded: bool, checkpointed: bool) -> nn.Module:
        """Convert a model, which is neither compiled nor sharded yet, in place and return it.

        ``sharded`` tells whether FSDP2 will shard the model, ``checkpointed`` whether the backward will repeat
        forwards.
        """
        convert(model, self.recipe, **self.options)
        if sharded and self.gather:
            fsdp_float8_all_gather(model, checkpointed=checkpointed)
        return model
