"""convert: turns torchtitan's training config into the config of the same training in FP8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torchtitan.trainer import Trainer

from fp8compile.integrations.torchtitan.built import building
from fp8compile.integrations.torchtitan.converter import Float8Converter
from fp8compile.integrations.torchtitan.parallelize import Float8Parallelize
from fp8compile.nn.convertible.assign_recipes import Recipes
from fp8compile.nn.convertible.filters import Filter

__all__ = ["convert"]


@dataclass(frozen=True)
class _Quantized:
    """Change that makes torchtitan's metrics omit MFU, which is relative to a GPU's bf16 peak.

    By itself, torchtitan omits MFU only for torchtitan's own quantized classes.
    """

    def build(self, plain: type[Any], config: Any, kwargs: dict[str, Any]) -> Any:
        return plain.build(config, **{**kwargs, "has_quantization": True})

    def to_dict(self) -> dict[str, Any]:
        return {"has_quantization": True}


def convert(
    config: Trainer.Config,
    recipe: Recipes,
    *,
    filter: Filter | None = None,
    keep_ends: int = 0,
    fsdp_float8_all_gather: bool = False,
) -> Trainer.Config:
    """Return a config for the same training run in FP8; the original config is not changed.

    Args:
        config: A config from torchtitan's registries.
        recipe: A recipe, or recipes by name pattern, as for `fp8compile.convert`.
        filter: Which layers to convert; None excludes layers that are too small to benefit from FP8.
        keep_ends: Number of blocks at each end of the model to leave in high precision.
        fsdp_float8_all_gather: Whether FSDP2 all-gathers weights in FP8, for recipes that support it. With a single
            rank, nothing is gathered.

    Raises:
        ValueError: The config has no model, or it is already converted.
    """
    spec = config.model_spec
    if spec is None:
        raise ValueError("convert: the config has no model_spec, so there is no model to convert. Set it first.")
    if isinstance(spec.parallelize_fn, Float8Parallelize):
        raise ValueError(
            "convert: this config is already converted. Convert the config from torchtitan's registry, once."
        )
    converter = Float8Converter.Config(recipe=recipe, filter=filter, keep_ends=keep_ends).build()
    parallelize = Float8Parallelize(spec.parallelize_fn, fsdp_float8_all_gather)
    converted = replace(spec, model=converter.convert(spec.model), parallelize_fn=parallelize)
    return replace(config, model_spec=converted, metrics=building(config.metrics, _Quantized()))
