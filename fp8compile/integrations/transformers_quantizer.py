"""F8Config: FP8 as a quantization method of transformers, to load and save pretrained models.

from_pretrained: model on the meta device --fp8compile.convert--> layers --weights of the file--> values, or codes
save_pretrained: the state dict, with codes where parameters are quantized; config.json with the recipe
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8compile.integrations.recipe_json import recipe_from_json, recipe_to_json
from fp8compile.layout.four_bit_packing import packed_in_rows
from fp8compile.layout.quantized import Quantized
from fp8compile.nn import convert
from fp8compile.nn.convertible.convertible_layers import is_converted, layers, weight_names
from fp8compile.nn.layer.codes_in_state import ENDS, PARTS
from fp8compile.nn.weights.quantize_weights import check_weights, makes_parameters, quantizers_of_sets
from fp8compile.quantizers import CALL, PARAMETER, Recipe, lifetime_of_flags, replace_lifetime_flags
from fp8compile.tensor import QuantizedParameter

__all__ = ["F8Config", "F8Quantizer"]

METHOD = "fp8compile"
OPTIONS = ("recipe", "filter", "weight_lifetime", "share_outer_scale")


@register_quantization_config(METHOD)
class F8Config(QuantizationConfigMixin):
    """Configuration for ``from_pretrained(..., quantization_config=F8Config(...))``; saved in config.json.

    Args:
        recipe: A recipe, its name such as ``"rowwise"``, or a mapping from name patterns to recipes.
        filter: Which layers to convert: name patterns, as for `fp8compile.convert`. By default all layers except
            output embeddings and tied weights, which transformers keeps in high precision.
        weight_lifetime: How long the FP8 data of weights live, as for `fp8compile.convert`; by default, what each
            recipe says. With ``"parameter"``, weights are quantized one by one while loading, and stored as FP8
            parameters. Train these with `fp8compile.integrations.transformers.master_weights`, or freeze them.
        share_outer_scale: Layers that share a global scale; see `fp8compile.convert`.
        others: Only what transformers reads from config.json: ``quant_method="fp8compile"``, and
            ``quantized_parameters`` in files of earlier versions.

    Raises:
        ValueError: The name of the recipe is unknown, a recipe read from JSON has an unknown class or field, a recipe
            has delayed scaling or ``weight_lifetime="parameter"``, or FP8 parameters are combined with
            ``share_outer_scale``.
        TypeError: ``recipe`` is not a recipe, or has a quantizer that can't be stored as JSON; or a keyword argument
            is unknown.
    """

    def __init__(
        self,
        recipe: Any = "rowwise",
        *,
        filter: Sequence[str] | None = None,
        weight_lifetime: str | None = None,
        share_outer_scale: Any = False,
        **others: Any,
    ) -> None:
        read = lifetime_of_flags if "quant_method" in others else replace_lifetime_flags  # files have the first
        others = dict(read({**others, "weight_lifetime": weight_lifetime}))
        weight_lifetime = others.pop("weight_lifetime")
        if others := {name: value for name, value in others.items() if (name, value) != ("quant_method", METHOD)}:
            given = ", ".join(f"{name}={value!r}" for name, value in others.items())
            raise TypeError(
                f"F8Config: got {given}, but the options are {', '.join(OPTIONS)}. To pass other arguments of "
                "fp8compile.convert, load the model without F8Config and convert it. Pass options of a recipe to "
                "the recipe's function, such as fp8compile.recipes.rowwise(scale='pow2')."
            )
        self.quant_method: Any = METHOD
        self.recipe: Any = recipe_from_json(recipe)
        self.filter: list[str] | None = None if filter is None else list(filter)
        self.weight_lifetime: str | None = weight_lifetime
        self.share_outer_scale: Any = share_outer_scale
        recipes = self.recipe.values() if isinstance(self.recipe, Mapping) else [self.recipe]
        for each in recipes:
            if not isinstance(each, Recipe):
                raise TypeError(f"F8Config: `recipe` is {each!r}; it must be a fp8compile.Recipe or the name of one.")
            if each.history():
                raise ValueError(
                    "F8Config: the recipe uses delayed scaling, but checkpoints in high precision do not contain "
                    "its state. Load the model, and convert it with fp8compile.convert."
                )
            each.with_lifetime(weight_lifetime or CALL)  # raises now if the recipe can't have it
        if weight_lifetime is None and any(map(makes_parameters, recipes)):
            raise ValueError(
                f"F8Config: a recipe has weight_lifetime={PARAMETER!r}, but FP8 parameters are created for all "
                f"layers, while the model is loaded. Pass F8Config(weight_lifetime={PARAMETER!r}) instead."
            )
        if self.makes_parameters() and share_outer_scale:
            raise ValueError(
                f"F8Config: share_outer_scale can't be combined with weight_lifetime={PARAMETER!r}, because each "
                "weight is quantized as soon as it is read, before the others are available. Omit one of them."
            )
        recipe_to_json(self.recipe)  # raises now, and not when the model is saved

    def makes_parameters(self) -> bool:
        """Whether weights become FP8 parameters while the model is loaded."""
        return self.weight_lifetime == PARAMETER

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a JSON-serializable dict, as stored in config.json."""
        return {**super().to_dict(), "recipe": recipe_to_json(self.recipe)}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


def _names_in_state(name: str) -> list[str]:
    """Return the state dict keys of the codes and scales of a quantized parameter ``name``."""
    return [f"{name}_{part}{end}" for end in ENDS for part in PARTS]


class _Codes(ConversionOps):
    """transformers' loading operation that builds a quantized parameter from a file's codes and scales.

    Because of the attribute ``hf_quantizer``, transformers passes tensors in the file's dtypes.
    """

    def __init__(self, hf_quantizer: F8Quantizer, name: str) -> None:
        self.hf_quantizer, self.name = hf_quantizer, name

    def convert(
        self, input_dict: Mapping[str, Any], *args: Any, model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Join the codes and scales of one parameter; return ``{full_layer_name: parameter}``.

        Raise a ValueError if the file lacks codes or a scale for one of the weight's quantizers.
        """
        layer, own, weight = _layer_of(model, full_layer_name)
        found = {key: each[0] if isinstance(each, list) else each for key, each in input_dict.items()}
        sets = []
        for quantizer, end in zip(quantizers_of_sets(layer), ENDS, strict=False):
            codes, scale, outer = (found.get(f"{self.name}_{part}{end}") for part in PARTS)
            if codes is None or scale is None:
                raise ValueError(
                    f"{full_layer_name}: the checkpoint has no {own}_codes{end} or no {own}_scale{end}. Load the "
                    "complete folder that save_pretrained wrote."
                )
            quantizer = packed_in_rows(quantizer, weight.shape)
            sets.append(Quantized(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer))
        parameter = QuantizedParameter.of_sets(sets, weight.dtype, batch=weight.ndim - 2)
        return {full_layer_name: nn.Parameter(parameter)}


class _Quantize(ConversionOps):
    """transformers' loading operation that quantizes a weight stored in high precision."""

    def convert(
        self, input_dict: Mapping[str, Any], *args: Any, model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        layer, _, weight = _layer_of(model, full_layer_name)
        (values,) = input_dict.values()
        values = values[0] if isinstance(values, list) else values
        with torch.no_grad():
            parameter = QuantizedParameter.of(
                values.to(weight.dtype), *quantizers_of_sets(layer), batch=weight.ndim - 2
            )
        return {full_layer_name: nn.Parameter(parameter)}


def _layer_of(model: nn.Module, full_name: str) -> tuple[nn.Module, str, Tensor]:
    """Return the layer of the parameter ``full_name``, the parameter's name in the layer, and the parameter."""
    path, _, name = full_name.rpartition(".")
    layer = model.get_submodule(path)
    return layer, name, getattr(layer, name)


@register_quantizer(METHOD)
class F8Quantizer(HfQuantizer):
    """Quantization method that transformers uses for an `F8Config`."""

    quantization_config: F8Config

    def _filter(self, model: Any) -> list[str]:
        if self.quantization_config.filter is not None:
            return self.quantization_config.filter
        left = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        names = {name for _, own in layers(model) for name in own}
        return ["*", *(f"!{name}" for name in sorted(names & set(left)))]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        own = self.quantization_config
        lifetime = CALL if own.makes_parameters() else own.weight_lifetime  # weights are quantized when they are read
        how = {"filter": self._filter(model), "share_outer_scale": own.share_outer_scale}
        convert(model, own.recipe, weight_lifetime=lifetime, **how)
        if own.makes_parameters():
            check_weights(model, {each: each.recipe for each in model.modules() if is_converted(each)})

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if is_converted(module):
                module.reach_codes()
                if module.is_quantized():
                    module.take_recipe(module.recipe.with_lifetime(PARAMETER))
        used = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [each for each in used if not _is_own(each)]
        return model

    def _makes_codes(self, model: nn.Module, name: str) -> bool:
        if not self.quantization_config.makes_parameters():
            return False
        path, _, own = name.rpartition(".")
        layer = model.get_submodule(path)
        return is_converted(layer) and own in weight_names(layer)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether the parameter ``param_name`` is quantized while loading."""
        return self._makes_codes(model, param_name)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the loading operation that quantizes a weight of the checkpoint."""
        return _Quantize()

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return a conversion for each parameter that is quantized in the checkpoint, then ``weight_conversions``."""
        if not self.pre_quantized or not self.quantization_config.makes_parameters():
            return weight_conversions
        names = {name for each in model.modules() if is_converted(each) for name in weight_names(each)}
        own = [WeightConverter(_names_in_state(name), name, [_Codes(self, name)]) for name in sorted(names)]
        return [*own, *weight_conversions]

    def is_serializable(self) -> bool:
        """True, because `save_pretrained` can save the model, quantized or in high precision."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True, because FP8 models can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True, because a Trainer can train the quantized weights without adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True, because FP8 models support ``torch.compile``."""
        return True


def _is_own(conversion: Any) -> bool:
    return any(isinstance(each, _Codes) for each in getattr(conversion, "operations", ()))
