"""PEFT's LoRA adapters on FP8 layers. Adapters can be merged into quantized weights, and unmerged bit for bit.

```python
import peft

import fp8compile as f8
from fp8compile.integrations import peft as f8peft

f8.freeze_weights(f8.convert(model, f8.recipes.blockwise()))
config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
model = peft.get_peft_model(model, f8peft.register(config))
```

The base layer computes in FP8 and the adapter in high precision, and their results are added. While PEFT itself
computes with the weight of the base layer, the weight is temporarily dequantized.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import layer as lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from fp8compile._compat import is_dtensor
from fp8compile.nn.convert.calibrate import set_row
from fp8compile.nn.experts.adapters import add_to_product, no_longer_add, takes_additions
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.layer.grouped_linear import grouped_linear
from fp8compile.nn.layer.linear import STATE, Linear
from fp8compile.ops.layer.delayed_scaling_state import ROW_OF_WEIGHT
from fp8compile.quantizers import DelayedScaling, Recipe
from fp8compile.tensor import has_codes, is_quantized_parameter

__all__ = ["register"]

HIGH_PRECISION = Recipe()
MERGE_TO = ("codes", "values")
SPREAD = (
    "{what}: {name} of the base model is sharded over ranks, so no rank has the full weight. {what} in a "
    "single process: save the adapter, and load it with the same base model there."
)


class _Base:
    """Copy of a LoRA base layer's state before a merge: weight, bias, and delayed-scaling state of the weight."""

    def __init__(self, layer: Any, name: str) -> None:
        self.weight: nn.Parameter = layer._parameters[name]
        bias = layer._parameters.get("bias") if name == "weight" else None
        self.bias: Tensor | None = None if bias is None else bias.detach().clone()
        state = [layer._buffers[each] for each in STATE if each in layer._buffers]
        self.rows: list[Tensor] = [each[ROW_OF_WEIGHT].clone() for each in state]

    def put_back(self, layer: Any, name: str) -> None:
        """Restore the layer from this copy; ``name`` is the weight's name."""
        setattr(layer, name, self.weight)
        with torch.no_grad():
            if self.bias is not None:
                layer.bias.copy_(self.bias)
            for key, row in zip(STATE, self.rows, strict=False):
                layer._buffers[key][ROW_OF_WEIGHT] = row


def _values_of(weight: Tensor) -> Tensor:
    found: Any = weight.detach()
    return found.dequantize().detach() if has_codes(found) else found.clone()


def _codes_like(layer: Any, name: str, weight: Any, values: Tensor) -> None:
    """Replace the weight ``name`` of a layer by ``values``, quantized by the quantizers of ``weight``.

    With delayed scaling, the new weight's scale comes from ``values``, because adapters may enlarge the amax.
    """
    made = copy.deepcopy(weight)
    is_frozen, made.frozen = made.frozen, False
    setattr(layer, name, made)
    with torch.no_grad():
        if isinstance(layer, Linear):
            layer.own_weight()
            if isinstance(quantizer := layer.recipe.weight, DelayedScaling):
                set_row(layer, ROW_OF_WEIGHT, quantizer, values.abs().amax().float())
        made.copy_(values)
    made.frozen = is_frozen


class _OverCodes:
    """Mixin of `LoraLinear` and `ParamWrapper`, before PEFT's class; replaces codes by values while PEFT computes.

    ``_base_of`` returns the FP8 layer and the name of its weight.
    """

    merge_to: str
    merged_adapters: list[str]
    _before: _Base | None
    _has_values: bool
    _caches: dict[str, Any]
    lora_A: nn.ModuleDict

    def _base_of(self) -> tuple[Any, str]:
        raise NotImplementedError

    def _pefts(self) -> Any:
        return super()

    def _whole_base(self, what: str) -> tuple[Any, str]:
        layer, name = self._base_of()
        if is_dtensor(layer._parameters[name]):
            raise RuntimeError(SPREAD.format(what=what, name=name))
        return layer, name

    @contextmanager
    def _base_with_values(self, what: str) -> Iterator[None]:
        """Context in which the base's weight is a dequantized copy; raise if the weight is sharded.

        ``what`` names the calling method in the error.
        """
        layer, name = self._whole_base(what)
        before = layer._parameters[name]
        values = nn.Parameter(_values_of(before), requires_grad=False)
        setattr(layer, name, values)
        self._has_values = True
        try:
            yield
        finally:
            setattr(layer, name, before)
            self._has_values = False

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base weight, which stays quantized if ``merge_to`` is ``"codes"``.

        If adapters were merged before, all are merged anew into the base as it was before the first merge. With
        ``safe_merge``, raise a ValueError and leave the base unchanged if a merged value is not finite.
        """
        if self._has_values:  # PEFT's own merging calls this for a variant that needs the weight before
            self._pefts().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [each for each in check_adapters_to_merge(self, adapter_names) or [] if each in self.lora_A]
        if not names:
            return
        layer, name = self._whole_base("merge")
        before = self._before or _Base(layer, name)
        now, merged = _Base(layer, name), list(self.merged_adapters)
        before.put_back(layer, name)
        self.merged_adapters.clear()
        try:
            with self._base_with_values("merge"):
                self._pefts().merge(safe_merge=safe_merge, adapter_names=[*merged, *names])
                found = layer._parameters[name].detach()
            if is_quantized_parameter(before.weight) and self.merge_to == "codes":
                _codes_like(layer, name, before.weight, found)
            else:
                setattr(layer, name, nn.Parameter(found, requires_grad=before.weight.requires_grad))
        except BaseException:
            now.put_back(layer, name)
            self.merged_adapters[:] = merged
            raise
        self._before = before

    def unmerge(self: Any) -> None:
        """Restore the base as it was before adapters were merged: the same codes, bit for bit."""
        if self._has_values:
            self._pefts().unmerge()
            return
        if self._before is None:
            warnings.warn("The adapters are already unmerged; nothing was done.", stacklevel=2)
            return
        self._before.put_back(*self._base_of())
        self._before = None
        self.merged_adapters.clear()
        self._caches.clear()


class _WithValues:
    """Stand-in for a base layer in PEFT's DoRA arithmetic: the layer's bias and its dequantized weight."""

    def __init__(self, layer: Any) -> None:
        weight = layer.weight
        self.weight = weight.dequantize() if has_codes(weight) else weight
        self.bias = layer.bias


class _DoraOverCodes(DoraLinearLayer):
    """PEFT's DoRA layer for a base with a quantized weight; computes norms from dequantized values."""

    def forward(self, x: Tensor, *, base_layer: nn.Module, **others: Any) -> Tensor:
        found: Tensor = super().forward(x, base_layer=_WithValues(base_layer), **others)
        return found


class LoraLinear(_OverCodes, lora.Linear):
    """PEFT's LoRA layer for a `fp8compile.Linear`.

    Args:
        base_layer: The layer, or a LoRA layer over it.
        adapter_name: Name of the first adapter.
        config: PEFT's configuration.
        merge_to: What merging turns a quantized base weight into: ``"codes"`` or ``"values"``.
        others: Further arguments that PEFT passes to its own class.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, *, merge_to: str, **others: Any
    ) -> None:
        if others.pop("parameter_name", None) is not None:
            raise ValueError(
                "peft: target_parameters contains the weight of a linear layer. Name the layer in target_modules "
                "instead."
            )
        self.merge_to: str = merge_to
        self._before, self._has_values = None, False
        super().__init__(base_layer, adapter_name, config=config, **others)

    def _base_of(self) -> tuple[Any, str]:
        return self.get_base_layer(), "weight"

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **others: Any) -> None:
        """Add an adapter of rank ``r``; requantizes the base's weight if initialization changes it (PiSSA)."""
        if not config.use_dora and not isinstance(config.init_lora_weights, str):
            super().update_layer(adapter_name, r, lora_alpha, config, **others)
            return
        layer, name = self._whole_base("update_layer")
        before = layer._parameters[name]
        with self._base_with_values("update_layer"):
            super().update_layer(adapter_name, r, lora_alpha, config, **others)
            found = layer._parameters[name].detach()
        if not torch.equal(found, _values_of(before)):
            if is_quantized_parameter(before):
                _codes_like(layer, name, before, found)
            else:
                setattr(layer, name, nn.Parameter(found, requires_grad=before.requires_grad))
        if config.use_dora:
            self.lora_magnitude_vector[adapter_name].__class__ = _DoraOverCodes


class ParamWrapper(_OverCodes, lora.ParamWrapper):
    """PEFT's LoRA layer for stacked weights of experts; PEFT recognizes the layer by its class name.

    PEFT's own class adds the product of A and B to all stacked weights in each forward. This class multiplies each
    input row by its expert's A and then B, and adds the result to the output, so that the base's codes do not change.

    Args:
        base_layer: The experts in FP8, or a LoRA layer over them.
        adapter_name: Name of the first adapter.
        config: PEFT's configuration; ``target_parameters`` names the stacked weights.
        merge_to: What merging turns a quantized base weight into: ``"codes"`` or ``"values"``.
        others: Further arguments that PEFT passes to its own class.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, *, merge_to: str, **others: Any
    ) -> None:
        self.merge_to: str = merge_to
        self._before, self._has_values = None, False
        super().__init__(base_layer, adapter_name, config=config, **others)
        layer, name = self._base_of()
        if not takes_additions(layer):
            raise TypeError(
                f"peft: {type(layer).__name__} computes its experts in its own method, to which adapters can't be "
                "added. Adapters are supported for experts of transformers with use_experts_implementation."
            )
        if is_dtensor(layer._parameters[name]):
            raise TypeError(
                f"peft: {name} is sharded over ranks, and adapters can't be. Add adapters before sharding."
            )
        add_to_product(layer, name, self._added)

    def _base_of(self) -> tuple[Any, str]:
        return self.get_base_layer(), self.parameter_name

    def _added(self, x: Tensor, offsets: Tensor) -> Tensor | None:
        """Return the sum of the active adapters' outputs, (R, out_features), for R rows ``x`` (R, in_features).

        The rows are sorted by expert; ``offsets`` has the end of each expert's rows. None if no adapter is active, or
        if adapters are merged.
        """
        if self.disable_adapters or self.merged:
            return None
        found = None
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            a: Any = self.lora_A[name].weight
            b: Any = self.lora_B[name].weight
            a = a.view(self.num_experts, -1, a.shape[-1]).to(x.dtype)  # (E, rank, in_features)
            b = b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1).contiguous().to(x.dtype)  # (E, out, rank)
            inner = grouped_linear(x, a, offsets, recipe=HIGH_PRECISION)
            own = grouped_linear(inner, b, offsets, recipe=HIGH_PRECISION) * self.scaling[name]
            found = own if found is None else found + own
        return found

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        yield  # the products add what `_added` returns, and the weight stays what it is

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Remove the adapters and return the experts; if ``merge`` is True, merge the adapters first.

        ``safe_merge`` and ``adapter_names`` go to `merge`.
        """
        layer: Any = self
        found: nn.Module = super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        while isinstance(layer, ParamWrapper):
            no_longer_add(found, layer.parameter_name)
            layer = layer.base_layer
        return found


def register(config: LoraConfig, *, merge_to: str = "codes") -> LoraConfig:
    """Configure PEFT to use this module's adapter layers for FP8 layers and experts.

    PEFT's own layers can neither merge into FP8 weights nor compute the norms of DoRA from them. PEFT does not save
    this setting, so pass the configuration to ``PeftModel.from_pretrained`` too:
    ``config=register(LoraConfig.from_pretrained(folder))``.

    Args:
        config: The configuration, modified in place. Use ``target_modules`` for linear layers and
            ``target_parameters`` for stacked weights of experts.
        merge_to: What a merge does to an FP8 weight. ``"codes"`` quantizes the merged weight with the same quantizers;
            ``"values"`` leaves it in high precision. Other weights are never quantized by a merge.

    Returns:
        The configuration.

    Raises:
        TypeError: ``config`` is not a ``LoraConfig``.
        ValueError: ``merge_to`` is neither ``"codes"`` nor ``"values"``.
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(f"register: `config` is a {type(config).__name__}; it must be a peft.LoraConfig.")
    if merge_to not in MERGE_TO:
        raise ValueError(f"register: `merge_to` is {merge_to!r}; it must be 'codes' or 'values'.")
    makers: dict[Any, Any] = {
        Linear: partial(LoraLinear, merge_to=merge_to),
        ConvertedExperts: partial(ParamWrapper, merge_to=merge_to),
    }
    config._register_custom_module(makers)
    return config
