"""What the integrations of other libraries' trainers do alike: convert, and tell FSDP2 what to gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8compile.nn import convert
from fp8compile.nn.assignment import Recipes
from fp8compile.parallel import fsdp_float8_all_gather

__all__ = ["Conversion"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Arguments of `fp8compile.convert`, and whether FSDP2 gathers codes.

    Attributes:
        recipe: As `fp8compile.convert` takes it.
        gather: Whether FSDP2, where it shards the model, gathers its FP8 weights as codes.
        options: Other arguments of `fp8compile.convert`.
    """

    recipe: Recipes
    gather: bool
    options: Mapping[str, Any]

    def replaces_parameters(self, *, sharded: bool) -> bool:
        """Whether parameters of the converted model are new objects, which no earlier optimizer has."""
        return bool(self.options.get("quantized_parameters")) or (sharded and self.gather)

    def apply(self, model: nn.Module, *, sharded: bool, checkpointed: bool) -> nn.Module:
        """Convert a model in place.

        Args:
            model: Neither compiled nor sharded yet.
            sharded: Whether FSDP2 will shard it.
            checkpointed: Whether the backward will repeat forwards.
        """
        convert(model, self.recipe, **self.options)
        if sharded and self.gather:
            fsdp_float8_all_gather(model, checkpointed=checkpointed)
        return model
