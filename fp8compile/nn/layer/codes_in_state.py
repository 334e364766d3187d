"""Entries of a state dict for quantized weights: codes and scales instead of values.

A parameter "weight" has the keys weight_codes, weight_scale and, with two levels of scales, weight_outer_scale. If
grad_input reads other codes, there are the same keys with the suffix _for_grad_input too.

What the codes mean, such as "e4m3 in blocks of 128 x 128", is in the state dict's ``_metadata``, which files of
``torch.save`` have too. A load compares it, if it is there; so never change these texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from fp8compile._compat import is_dtensor, local_itself
from fp8compile.layout.quantized import Quantized
from fp8compile.layout.shapes import codes_shape, scale_shape
from fp8compile.nn.layer.cached_weights import KeepsCodes
from fp8compile.nn.layer.layer_registry import CONVERTED, FORWARD_DTYPES, USES
from fp8compile.nn.layer.observed_module import Observed
from fp8compile.nn.layer.redistribute_like import redistribute_like
from fp8compile.nn.layer.tensor_parallel_weights import placements_of_outer_scale, placements_of_scale
from fp8compile.quantizers import Quantizer
from fp8compile.recipes import describe
from fp8compile.tensor import count_write, is_quantized_parameter, share_scale_of_part, shown

__all__ = ["CodesInState", "codes_and_scales", "reach_codes"]


# in the state of a copy: what forwards of the original did with its parameters, and to which dtypes they cast weights
COPIED: dict[str, Any] = {"_fp8compile_uses": USES, "_fp8compile_forward_dtypes": FORWARD_DTYPES}
PARTS = ("codes", "scale", "outer_scale")  # fields of a `Quantized`
ENDS = ("", "_for_grad_input")  # suffix of the names for the first and the second set of codes
MEANINGS = "fp8compile_codes"  # in a module's metadata: for each quantized parameter, what each set of codes means


def _over_ranks(weight: Any, own: Quantized, part: str) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the placements of a DTensor's codes or scales, and their shape over all ranks.

    ``part`` is ``"codes"``, ``"scale"`` or ``"outer_scale"``; ``own`` has this rank's codes and scales.
    """
    if part == "codes":
        return weight.placements, codes_shape(weight.shape, own.quantizer)
    if part == "scale":
        return placements_of_scale(weight, own), scale_shape(weight.shape, own.quantizer)
    return placements_of_outer_scale(weight), weight.shape[:1]


def _part(weight: Any, part: str, index: int) -> Tensor | None:
    """Return the codes or a scale of a quantized parameter; None if it has no such part.

    ``part`` is a name in ``PARTS``; ``index`` is 0 for the codes that the output reads, 1 for those of grad_input.
    """
    sets = local_itself(weight).sets()
    local = getattr(sets[index], part) if index < len(sets) else None
    if local is None or not is_dtensor(weight):
        return local
    placements, shape = _over_ranks(weight, sets[index], part)
    if part != "codes" and all(each.is_replicate() for each in placements):
        return local
    stride = torch.empty(tuple(shape), device="meta").stride()
    return type(weight).from_local(
        local, weight.device_mesh, placements, run_check=False, shape=Size(shape), stride=stride
    )


def codes_and_scales(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the codes and scales of the quantized parameter ``name``, by their keys in a state dict."""
    found = {}
    for index, end in enumerate(ENDS):
        for part in PARTS:
            if (tensor := _part(weight, part, index)) is not None:
                found[f"{name}_{part}{end}"] = tensor
    return found


def _meanings(weight: Tensor) -> list[str]:
    """Describe, for each set of codes, what codes and scales of the same shapes and dtypes may differ in."""
    return [_meaning(own.quantizer, weight.shape[-2:]) for own in local_itself(weight).sets()]


def _meaning(quantizer: Quantizer, matrix: Sequence[int]) -> str:
    kind = type(quantizer)
    own = "" if kind.dequantize is Quantizer.dequantize else f" of {kind.__name__}"
    rows, columns = (
        size if each == -1 else min(each, size) for each, size in zip(quantizer.block, matrix, strict=True)
    )
    return f"{quantizer.format}{own} in blocks of {rows} x {columns}"


class PartOfCodes:
    """Descriptor that makes a key of a module's state dict, such as ``weight_codes``, an attribute of the module.

    PyTorch's checkpoints call ``getattr`` with each key of a state dict.
    """

    def __init__(self, parameter: str, part: str, index: int) -> None:
        self._where = parameter, part, index
        self.__doc__ = f"The {part} of a quantized ``{parameter}``{', for grad_input' * index}, as its state dict has."

    def __get__(self, module: CodesInState | None, owner: type[Any] | None = None) -> Any:
        if module is None:
            return self
        parameter, part, index = self._where
        weight = module._quantized_parameters().get(parameter)
        found = None if weight is None else _part(weight, part, index)
        if found is None:
            raise AttributeError(f"{type(module).__name__}: {parameter} has no {part}{ENDS[index]}.")
        return found


def reach_codes(cls: type[CodesInState], parameter: str) -> None:
    """Add `PartOfCodes` attributes such as ``weight_codes`` to a module class for the parameter ``parameter``."""
    for index, end in enumerate(ENDS):
        for part in PARTS:
            if not hasattr(cls, f"{parameter}_{part}{end}"):
                setattr(cls, f"{parameter}_{part}{end}", PartOfCodes(parameter, part, index))


class CodesInState(KeepsCodes, Observed):
    """Base of modules whose state dict has codes and scales of quantized parameters, not values.

    A state dict with values loads too: the values are quantized. Codes load if they mean the same by this recipe; a
    state dict without metadata does not say what they mean.
    """

    def _quantized_parameters(self) -> dict[str, Tensor]:
        own = {name: each for name, each in self._parameters.items() if each is not None}
        return {name: each for name, each in own.items() if is_quantized_parameter(local_itself(each))}

    def reach_codes(self) -> None:
        """Add attributes such as ``weight_codes`` to this module's class for its quantized parameters."""
        for name in self._quantized_parameters():
            reach_codes(type(self), name)

    def __getstate__(self) -> dict[str, Any]:
        known = {name: table[self] for name, table in COPIED.items() if self in table}
        return {**super().__getstate__(), **known} if known else super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, table in COPIED.items():
            if name in state:
                table[self] = state[name]
        super().__setstate__({name: each for name, each in state.items() if name not in COPIED})
        self.reach_codes()
        CONVERTED.add(self)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module: the base class's text, and the recipe's name or repr."""
        recipe: Any = self.recipe
        name, own = describe(recipe), super().extra_repr()
        return f"{own}{', ' if own else ''}recipe={shown(recipe) if name == 'custom' else name}"

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: torch.jit.script does not support recipes. Use torch.compile or torch.export, "
            "or script the model after fp8compile.revert."
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
        for name, weight in self._quantized_parameters().items():
            metadata.setdefault(MEANINGS, {})[name] = _meanings(weight)
            del destination[prefix + name]
            for key, part in codes_and_scales(name, weight).items():
                destination[prefix + key] = part.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        quantized = self._quantized_parameters()
        if quantized and local_metadata.get("assign_to_params_buffers", False):
            error_msgs += [
                f"{prefix}{name} is quantized, and is loaded into its existing memory. Load without assign=True, "
                "after to_empty() if it is on the meta device."
                for name in quantized
            ]
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, weight in quantized.items():
            keys = {prefix + key for key in codes_and_scales(name, weight)}
            if not keys <= state_dict.keys():
                continue
            try:
                _check_meanings(prefix + name, weight, local_metadata.get(MEANINGS, {}).get(name))
                _take(name, weight, state_dict, prefix)
            except ValueError as error:
                error_msgs.append(str(error))
            missing_keys[:] = [key for key in missing_keys if key != prefix + name]
            unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]


def _check_meanings(name: str, weight: Tensor, given: Sequence[str] | None) -> None:
    for found, own in zip(given or (), _meanings(weight), strict=False):
        if found != own:
            raise ValueError(
                f"load_state_dict: {name} was quantized as {found}, but the recipe of this model has {own}. Convert "
                "the model with the recipe of the checkpoint, or load dequantized weights, saved with .dequantize()."
            )


def _take(name: str, weight: Tensor, state_dict: Mapping[str, Any], prefix: str) -> None:
    found = codes_and_scales(name, weight)
    for key, own in found.items():  # all of them before the first copy, so that an error leaves the weight unchanged
        given = state_dict[prefix + key]
        if own.shape != given.shape or own.dtype != given.dtype:
            raise ValueError(
                f"load_state_dict: {prefix}{key} has shape {tuple(given.shape)}, {given.dtype}, but the model has "
                f"{tuple(own.shape)}, {own.dtype}. Load a checkpoint of a model of the same size, converted with the "
                "same recipe."
            )
    with torch.no_grad():
        for key, own in found.items():
            own.copy_(redistribute_like(state_dict[prefix + key], own))
    count_write(weight)
    local = local_itself(weight)
    local.written = True
    if local.has_all_scales and is_dtensor(weight):
        share_scale_of_part(weight)  # `keep` reads values, and a model is loaded before its first forward
    local.keep(local)
