"""Gathers sharded parameters: as values or, matrix by matrix, as the codes that the forward uses.

Each rank quantizes its shard with the whole tensor's scales, and then sends codes. Only parameters that the
checkpoint stores in high precision are sent as values. All ranks that share a parameter call these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile._compat import local_itself, replicated
from fp8compile.export.fill_whole_tensor import fill, place_of, send
from fp8compile.export.whole_matrix import WholeMatrix, amax_of_all
from fp8compile.layout.cuts import DimSharding, Sharding
from fp8compile.layout.four_bit_packing import one_a_byte, packed_dim
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.nn.experts.known_modules import as_it_lies, is_transposed
from fp8compile.nn.layer.linear import Linear
from fp8compile.ops.layer.delayed_scaling_state import ROW_OF_INPUT, ROW_OF_WEIGHT
from fp8compile.ops.layer.quantize_over_ranks import dequantized, quantize_part
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import DelayedScaling, Quantizer
from fp8compile.tensor import has_codes, is_quantized_parameter, sharding_of

__all__ = ["WholeCodes", "scale_of_input", "whole_codes", "whole_values"]


def _local_values(parameter: Tensor) -> Tensor:
    local: Any = local_itself(parameter)
    values: Tensor = getattr(local, "plain", local).detach()
    return values


def _codes_of_parameter(parameter: Tensor) -> Quantized:
    """Return this rank's codes and scales of a quantized parameter, for the forward's GEMM."""
    own: Quantized = local_itself(parameter).sets()[0]
    cuts = sharding_of(parameter)
    return replace(own, layout=TensorLayout(cuts, own.layout.batch)) if cuts else own


# ---------------------------------------------------------------------------------- values


def whole_values(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Gather the values of a parameter or buffer in ``dtype``, by default the parameter's; codes are dequantized."""
    local: Any = local_itself(parameter)
    if is_quantized_parameter(local):
        own = _codes_of_parameter(parameter)
        if own.cuts or own.layout.batch:
            codes, quantizer = one_a_byte(own.codes, own.quantizer)
            own = replace(own, codes=codes, quantizer=quantizer)
        values = dequantized(own, local.dtype if dtype is None else dtype).local
    else:
        values = _local_values(parameter)
    dtype = values.dtype if dtype is None or not values.is_floating_point() else dtype
    if not (cuts := sharding_of(parameter)):
        return values.to(dtype)
    whole = values.new_empty(parameter.shape, dtype=dtype)
    whole[place_of(cuts, parameter.shape)] = values
    fill(whole, cuts, parameter.shape)
    return whole


# ---------------------------------------------------------------------------------- codes


def _owners(cuts: Sharding, index: int) -> tuple[list[int], list[bool], int]:
    """Find the rank that has matrix ``index`` of stacked weights (the owner).

    Returns:
        The owner's rank in each sharding of ``cuts``, from the outermost on.
        For each i from 0 on, whether this rank has the owner's rank in the first i shardings.
        The index of the matrix in the owner's local stack.
    """
    owners: list[int] = []
    is_mine = [True]
    for cut in cuts:
        assert cut is not None
        ends = list(accumulate(cut.sizes))
        owner = next((rank for rank, end in enumerate(ends) if index < end), 0) if is_mine[-1] else 0
        index -= ends[owner] - cut.sizes[owner]
        owners.append(owner)
        is_mine.append(is_mine[-1] and owner == cut.rank)
    return owners, is_mine, index


@dataclass(frozen=True, kw_only=True)
class WholeCodes:
    """Gathers the codes of a sharded weight, one matrix at a time.

    Attributes:
        shape: Shape of the whole parameter, (N, K) or (E, N, K), as the model's module stores it.
        part: This rank's shard of the parameter: values, or codes.
        quantizer: Quantizer of each matrix as the module stores it.
        is_turned: Whether the module stores matrices transposed, (in_features, out_features).
        dtype: Dtype to which values are cast before they are quantized; None without a cast.
        outer_amax: Amax for a scale that several matrices share, (1,) float32; None if the scale is not shared.
        multiplier: 1 / scale, by which values are multiplied before rounding, (1, 1) float32; None to compute it.
    """

    shape: tuple[int, ...]
    part: Plain | Quantized
    quantizer: Quantizer
    is_turned: bool = False
    dtype: torch.dtype | None = None
    outer_amax: Tensor | None = None
    multiplier: Tensor | None = None

    def matrix(self, index: int | None) -> Quantized:
        """Gather codes (N, K) and scales of matrix ``index`` of a stack, or of the only matrix if ``index`` is None.

        Collective call of all ranks with a shard.
        """
        cuts: list[DimSharding] = [cut for cut in self.part.cuts if cut is not None]
        if index is None:
            return self._made(self.part, tuple(cuts))
        of_stack = tuple(cut for cut in cuts if not cut.dim)
        within = tuple(replace(cut, dim=cut.dim - 1) for cut in cuts if cut.dim)
        owners, is_mine, index = _owners(of_stack, index)
        found = self._made(self._matrix_of_part(index, within) if is_mine[-1] else None, within)
        # an inner cut divides what a rank of an outer cut has: the owner sends to its inner group first
        for level in reversed(range(len(of_stack))):
            if is_mine[level]:
                for tensor in found.parts():
                    send(tensor, of_stack[level], owners[level])
        return found

    def _matrix_of_part(self, index: int, cuts: Sharding) -> Plain | Quantized:
        if isinstance(self.part, Plain):
            return Plain(self.part.local[index], TensorLayout(cuts))
        outer = None if self.part.outer_scale is None else self.part.outer_scale[index : index + 1]
        codes, scale = self.part.codes[index], self.part.scale[index]
        return replace(self.part, codes=codes, scale=scale, outer_scale=outer, layout=TensorLayout(cuts))

    def _made(self, part: Plain | Quantized | None, cuts: Sharding) -> Quantized:
        """Gather a matrix that ``cuts`` shards; ``part`` is this rank's shard.

        If ``part`` is None, because other ranks have the matrix, return an uninitialized matrix for `send` to fill.
        """
        if isinstance(part, Quantized) and not any(self.part.cuts):
            found = part.t() if self.is_turned else part
            if packed_dim(found.quantizer) != -2:  # else a row of codes has values of two rows
                return found
        device = local_itself(self.part.local if isinstance(self.part, Plain) else self.part.codes).device
        whole = WholeMatrix(self.quantizer, self.shape[-2:], cuts, device, is_turned=self.is_turned)
        if part is None:
            return whole.matrix
        if isinstance(part, Quantized):
            whole.copy(part)
        else:
            given = {"outer_amax": self.outer_amax, "multiplier": self.multiplier}
            whole.quantize(part, self.quantizer, self.dtype, **given)
        return whole.filled()


def _amax_of_group(layer: nn.Module, dtype: torch.dtype | None) -> Tensor | None:
    """Return the amax over all layers and ranks that share a scale with ``layer``, (1,) float32; None if none do.

    Values are cast to ``dtype`` first, unless it is None.
    """
    if not isinstance(layer, Linear) or not layer.scale_group:
        return None
    weights: list[Any] = [each.weight for each in layer.scale_group]
    parts = (Plain(_local_values(each), TensorLayout(sharding_of(each))) for each in weights)
    return torch.cat([amax_of_all(each, dtype) for each in parts]).amax(0, keepdim=True)


def whole_codes(layer: nn.Module, parameter: Tensor, dtype: torch.dtype | None) -> WholeCodes:
    """Prepare to gather a converted layer's weight as the codes that the layer's forward multiplies by.

    ``dtype`` is the dtype to which the forward casts values before it quantizes them; None without a cast.
    """
    shape, turned = tuple(parameter.shape), is_transposed(layer)
    if has_codes(local_itself(parameter)):  # a parameter that is codes, or one that FSDP2 has gathered as codes
        part = _codes_of_parameter(parameter)
        return WholeCodes(shape=shape, part=part, quantizer=part.quantizer, is_turned=turned)
    recipe: Any = layer.recipe
    quantizer = as_it_lies(layer, recipe.weight)
    values = Plain(_local_values(parameter), TensorLayout(sharding_of(parameter), parameter.ndim - 2))
    found = WholeCodes(shape=shape, part=values, quantizer=quantizer, is_turned=turned, dtype=dtype)
    if isinstance(layer, Linear) and isinstance(quantizer, DelayedScaling):
        return replace(found, multiplier=replicated(layer.multiplier)[ROW_OF_WEIGHT].view(1, 1))
    amax = _amax_of_group(layer, dtype)
    if quantizer.is_local():
        return replace(found, outer_amax=amax)
    cast = values if dtype is None else replace(values, local=values.local.to(dtype))
    part = quantize_part(cast, quantizer, PYTHON_OF_STEPS, outer_amax=amax)  # noise is that of a place in the shard
    return WholeCodes(shape=shape, part=part, quantizer=part.quantizer, is_turned=turned)


def scale_of_input(layer: Linear) -> Tensor:
    """Return the scale of a layer's input in the next step, () float32, from its delayed-scaling state."""
    quantizer: Any = layer.recipe.input
    return quantizer.scale_of(replicated(layer.multiplier)[ROW_OF_INPUT])
