"""Handlers of ops that make a tensor like a QuantizedParameter, such as empty_like and new_zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.four_bit_packing import packed_dim
from fp8compile.layout.quantized import Quantized
from fp8compile.tensor.parameter_attributes import moved
from fp8compile.tensor.quantized_parameter import BLANK, WHOLE, WRITES, QuantizedParameter
from fp8compile.tensor.requantize import shared_with
from fp8compile.tensor.scale_without_values import scale_without_values
from fp8compile.tensor.shards import cut_dim

aten: Any = torch.ops.aten


def _empty_like(func: Any, x: QuantizedParameter, **kwargs: Any) -> Tensor:
    """Run ``empty_like``: return a parameter with uninitialized codes, whose scales are NaN."""
    if kwargs.pop("dtype", None) not in (None, x.dtype):
        raise TypeError(
            f"{func} of a QuantizedParameter can't change the dtype. Call it on the result of .dequantize()."
        )
    sets = []
    for own in x.sets():
        codes, outer = func(own.codes, **kwargs), own.outer_scale
        scale = scale_without_values(own.quantizer, own.scale.shape, torch.nan, codes.device)
        outer = None if outer is None else torch.full(outer.shape, torch.nan, device=codes.device)
        sets.append(replace(own, codes=codes, scale=scale, outer_scale=outer))
    found = x.like(sets).alone()
    found.gathers = copy.deepcopy(x.gathers)
    if x.initial is not None:
        found.initial = torch.tensor(torch.nan)
    return found


def _plain_like(func: Any, x: QuantizedParameter, *args: Any, **kwargs: Any) -> Tensor:
    """Run an op such as ``zeros_like``: return a plain tensor of the shape of ``x``, for optimizer state."""
    values = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return func(values, *args, **{"device": x.device, **kwargs})


def _cuts_blocks(x: QuantizedParameter, own: Quantized, size: Sequence[int]) -> bool:
    """Whether FSDP2 asks for a shard of ``x``, of shape ``size``, that ends within a block of the codes ``own``."""
    if x.extent != WHOLE or len(size) != x.ndim:
        return False
    dim = cut_dim(x, size)
    is_part = size[dim] < x.shape[dim] and (x.batch or dim == 0)
    is_part = is_part and tuple(size[dim + 1 :]) == tuple(x.shape[dim + 1 :])
    block = x.block_along(own, dim)
    return bool(is_part and block not in (1, -1) and size[dim] % block)


def _blank_set(func: Any, x: QuantizedParameter, own: Quantized, size: Sequence[int], **kwargs: Any) -> Quantized:
    """Make codes of zeros, and scales, for a tensor of shape ``size`` with the quantizer of ``own``.

    Scales that all shards of the weight have are copied, because ranks without elements need them too.
    """
    if packed_dim(own.quantizer) == -2 and (len(size) < 2 or size[-2] % 2):
        raise TypeError(
            f"{func} {tuple(size)} of a QuantizedParameter that stores values of two rows in one byte "
            f"({own.quantizer!r}) requires an even number of rows. If this is fully_shard: use an even number of rows "
            "per rank, use fp8compile.recipes.nvfp4() with weight_block=(16, 16), or weight_lifetime='call'."
        )
    batch, outer = tuple(size[: x.batch]), own.outer_scale
    codes = own.codes.new_zeros((*batch, *own.quantizer.codes_shape(size[x.batch :])), **kwargs)
    if outer is not None:
        is_same = not x.batch or size[0] == x.shape[0]
        outer = outer.to(codes.device).clone() if is_same else torch.ones(size[0], device=codes.device)
    found = replace(own, codes=codes, outer_scale=outer)
    dim = cut_dim(x, size) if len(size) == x.ndim else 0
    if not own.has_all_scales and _cuts_blocks(x, own, size):
        is_column = dim == x.ndim - 1
        found = replace(found, has_scales_of_whole=(not is_column, is_column))
    shape = (*batch, *own.quantizer.scale_shape(size[x.batch :]))
    if found.has_all_scales or (x.block_along(own, dim) == -1 and own.scale.shape == shape):
        return replace(found, scale=own.scale.to(codes.device).clone())
    return replace(found, scale=scale_without_values(own.quantizer, shape, 1.0, codes.device))


def _new_zeros(func: Any, x: QuantizedParameter, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Run ``func``, new_zeros or new_empty: return a parameter of zero codes, which FSDP2 fills."""
    if x.batch and len(size) != x.ndim:  # FSDP2 does this for a rank without elements
        return x.flat([own.codes.new_empty(size, **kwargs) for own in x.sets()])
    if kwargs.pop("dtype", None) not in (None, x.dtype):
        raise TypeError(f"{func} of a QuantizedParameter can't change the dtype. Use torch.zeros(shape, dtype=...).")
    sets = [_blank_set(func, x, own, size, **kwargs) for own in x.sets()]
    found = QuantizedParameter.of_sets(sets, x.dtype, batch=x.batch)
    if x.extent == WHOLE:  # FSDP2 is about to cut `x`
        found.outer = tuple(shared_with(x, own) for own in x.stored())
    else:
        found.group, found.shard_dim, found.outer = x.group, x.shard_dim, x.outer
    found.sizes = x.sizes if found.has_all_scales else None
    found.extent = BLANK if not x.batch or cut_dim(x, size) else WHOLE  # each rank has whole matrices
    found.written, found.gathers, found.state, found.frozen = x.written, x.gathers, x.state, x.frozen
    found.blank = True
    if x.initial is not None:
        found.initial = torch.zeros(())
    return found


def _made(make: Callable[..., Tensor]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]:
    return lambda func, args, kwargs: moved(func, args[0], make(func, *args, **kwargs))


WRITES.update(
    {
        aten.empty_like.default: _made(_empty_like),
        **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), _made(_plain_like)),
        aten.new_zeros.default: _made(_new_zeros),
        aten.new_empty.default: _made(_new_zeros),  # FSDP2 calls it for a rank without elements
    }
)
