"""Gather a parameter that ranks share to one whole tensor: its values, or the codes that the forward multiplies.

Ranks quantize their shards with the scales of the whole weight, and then send codes; experts are sent one at a time.
Values in high precision are sent only for parameters that stay in it. All ranks that share a parameter call these
functions.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile import ops
from fp8compile._compat import local_itself, replicated
from fp8compile.export.in_slices import IN_SLICES
from fp8compile.layout.packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.nn.experts.known_modules import as_it_lies, is_transposed
from fp8compile.nn.linear import Linear
from fp8compile.nn.outer_amax import WHOLE_TENSOR
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer.over_ranks import gather
from fp8compile.ops.layer.quantize import quantize_part, whole_amax
from fp8compile.ops.layer.write_state import ROW_OF_INPUT, ROW_OF_WEIGHT
from fp8compile.quantizers import DelayedScaling
from fp8compile.tensor import has_codes, is_quantized_parameter, sharding_of

__all__ = ["matrix_of", "scale_of_input", "whole_codes", "whole_values"]

Part = TypeVar("Part", Plain, Quantized)


def _has_whole_matrices(layout: TensorLayout) -> bool:
    """Whether ranks have whole matrices of a stack, so that each one can be sent by itself."""
    cuts = [cut for cut in layout.cuts if cut is not None]
    return bool(cuts) and all(cut.dim < layout.batch for cut in cuts)


def _gathered(part: Part) -> Part:
    if isinstance(part, Quantized) and _has_whole_matrices(part.layout):
        return part  # `matrix_of` sends a matrix
    for index in range(len(part.cuts)):
        if part.cuts[index] is not None:  # a gather may take later groups with it
            part = gather(part, index)
    return part


def _local_values(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    local: Any = local_itself(parameter)
    values = getattr(local, "plain", local).detach()
    return values if dtype is None or not values.is_floating_point() else values.to(dtype)


def whole_values(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    """All values of a parameter or buffer; a parameter that is kept as codes is dequantized to ``dtype``.

    Args:
        parameter: A tensor or a DTensor; its local tensor may be a `QuantizedParameter`.
        dtype: Dtype of the values; None for the parameter's own.
    """
    local: Any = local_itself(parameter)
    if is_quantized_parameter(local):
        codes = _codes_of_parameter(parameter)
        own = local.dtype if dtype is None else dtype
        if codes.layout.batch:
            matrices = [matrix_of(codes, index) for index in range(parameter.shape[0])]
            return torch.stack([_values_of(each, own) for each in matrices])
        return _values_of(codes, own)
    return _gathered(Plain(_local_values(parameter, dtype), TensorLayout(sharding_of(parameter)))).local


def _of_owner(stack: Quantized, index: int) -> Quantized:
    """One matrix of a stack of codes that ranks share; the rank that has the matrix sends it to all others.

    Ranks of an inner cut hold a part of what a rank of an outer cut holds. So the owner sends the matrix to the ranks
    of its innermost group first; then they send it to their outer groups.
    """
    owners: list[int] = []
    is_mine = [True]  # whether this rank lies in the owner's part of the cuts so far
    for cut in (cut for cut in stack.cuts if cut is not None):
        ends = list(accumulate(cut.sizes))
        owner = next((rank for rank, end in enumerate(ends) if index < end), 0) if is_mine[-1] else 0
        index -= ends[owner] - cut.sizes[owner]
        owners.append(owner)
        is_mine.append(is_mine[-1] and owner == cut.rank)
    local = replace(stack, layout=TensorLayout(batch=1))
    if is_mine[-1]:
        found = matrix_of(local, index).each(lambda tensor: tensor.contiguous())
    else:
        shapes = [tensor.new_empty((1, *tensor.shape[1:])) for tensor in local.parts()]
        codes, scale, *outer = shapes
        found = matrix_of(replace(local, codes=codes, scale=scale, outer_scale=outer[0] if outer else None), 0)
    cuts: list[Any] = [cut for cut in stack.cuts if cut is not None]
    for level in reversed(range(len(cuts))):
        if is_mine[level]:
            group = cuts[level].group
            if isinstance(group, str):
                group = _resolve_process_group(group)  # type: ignore[arg-type]  # names are a type of their own since 2.13
            for tensor in found.parts():
                torch.distributed.broadcast(tensor, group=group, group_src=owners[level])
    return found


def matrix_of(stack: Quantized, index: int) -> Quantized:
    """One matrix of a stack of codes, with its scales. If ranks share the stack, all of them call this.

    Args:
        stack: The codes.
        index: Number of the matrix in the whole stack.
    """
    if _has_whole_matrices(stack.layout):
        return _of_owner(stack, index)
    outer = None if stack.outer_scale is None else stack.outer_scale[index : index + 1]
    return replace(stack, codes=stack.codes[index], scale=stack.scale[index], outer_scale=outer, layout=TensorLayout())


def _values_of(matrix: Quantized, dtype: torch.dtype) -> Tensor:
    return ops.dequantize(matrix.codes, matrix.scale, matrix.quantizer, dtype, *matrix.scales[1:])


def _codes_of_parameter(parameter: Tensor) -> Quantized:
    own: Quantized = local_itself(parameter).sets()[0]
    cuts = sharding_of(parameter)
    if not cuts:
        return own
    codes, quantizer = one_a_byte(own.codes, own.quantizer)
    layout = TensorLayout(cuts, own.layout.batch)
    return _gathered(replace(own, codes=codes, quantizer=quantizer, layout=layout))


def _delayed_codes(layer: Linear, parameter: Tensor, dtype: torch.dtype | None) -> Quantized:
    quantizer: Any = layer.recipe.weight
    multiplier = replicated(layer.multiplier)[ROW_OF_WEIGHT].view(1, 1)
    codes = IN_SLICES.cast(_local_values(parameter, dtype), multiplier, quantizer)
    layout, scale = TensorLayout(sharding_of(parameter)), quantizer.scale_of(multiplier)
    return _gathered(Quantized(codes=codes, scale=scale, quantizer=quantizer, layout=layout))


def _shared_amax(layer: nn.Module, dtype: torch.dtype | None) -> Tensor | None:
    """The amax over all ranks that decides the scale that a layer shares with others, (1,) float32; else None."""
    if not isinstance(layer, Linear) or not layer.scale_group:
        return None
    found = []
    for each in layer.scale_group:
        weight: Any = each.weight
        cuts = sharding_of(weight)
        own = whole_amax(Plain(_local_values(weight, dtype), TensorLayout(cuts)), WHOLE_TENSOR).view(1)
        for cut in cuts:
            own = own if cut is None else all_reduce_amax(own, cut.group)
        found.append(own)
    return torch.cat(found).amax(0, keepdim=True)


def _codes_as_they_lie(layer: nn.Module, parameter: Tensor, dtype: torch.dtype | None) -> Quantized:
    if has_codes(local_itself(parameter)):  # a parameter that is codes, or one that FSDP2 has gathered as codes
        return _codes_of_parameter(parameter)
    recipe: Any = layer.recipe
    quantizer = as_it_lies(layer, recipe.weight)
    if isinstance(layer, Linear) and isinstance(quantizer, DelayedScaling):
        return _delayed_codes(layer, parameter, dtype)
    batch = 1 if parameter.ndim == 3 else 0
    part = Plain(_local_values(parameter, dtype), TensorLayout(sharding_of(parameter), batch))
    return _gathered(quantize_part(part, quantizer, IN_SLICES, outer_amax=_shared_amax(layer, dtype)))


def whole_codes(layer: nn.Module, parameter: Tensor, dtype: torch.dtype | None) -> Quantized:
    """The codes of a converted layer's weight as its forward multiplies them; a stack for experts.

    They are whole, except a stack whose matrices lie on several ranks: `matrix_of` gives each of its matrices.

    Args:
        layer: The layer.
        parameter: Its weight; a tensor or a DTensor, of values or of codes.
        dtype: Dtype to which the forward casts values before it quantizes them; None if it does not.

    Returns:
        Codes (N, K) or (E, N, K), also for modules that keep matrices as (in_features, out_features).
    """
    found = _codes_as_they_lie(layer, parameter, dtype)
    return found.t() if is_transposed(layer) else found


def scale_of_input(layer: Linear) -> Tensor:
    """The scale of a layer's input in the next step, from its state of delayed scaling: () float32."""
    quantizer: Any = layer.recipe.input
    return quantizer.scale_of(replicated(layer.multiplier)[ROW_OF_INPUT])
