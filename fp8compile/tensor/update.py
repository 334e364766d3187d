"""Updates of quantized weights: values in, codes and scale out, with the amax of all ranks that share a scale.

values of each weight --amax--> amaxes --(one maximum over the ranks for all of them)--> scales --> codes, in place
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import ops
from fp8compile._compat import local_itself
from fp8compile.layout.cuts import Sharding
from fp8compile.ops.collectives import all_reduce_amaxes
from fp8compile.ops.layer.quantize import Scales
from fp8compile.quantizers import DelayedScaling, Quantizer

if TYPE_CHECKING:
    from fp8compile.tensor.parameter import QuantizedParameter

__all__ = ["assign", "count_write", "shared_with", "stand_for"]


def shared_with(weight: QuantizedParameter) -> ProcessGroup | None:
    """The ranks that have one of its scales too, if there are any: of a block, or of two levels the outer one."""
    return _share_outer(weight) if weight.quantizer.has_outer_scale() else _share_blocks(weight)


def _share_outer(weight: QuantizedParameter) -> ProcessGroup | None:
    """The ranks that have elements of the same matrix, if there are any."""
    is_alone = weight.shard_dim is None or weight.is_stacked_along(weight.shard_dim)
    return None if is_alone else weight.group


def _share_blocks(weight: QuantizedParameter) -> ProcessGroup | None:
    """The ranks that have elements of the same blocks, if there are any."""
    if weight.group is None or weight.shard_dim is None:
        return None
    return weight.group if weight.has_all_scales or weight.block_along(weight.shard_dim) == -1 else None


def _over_ranks(
    weights: Sequence[QuantizedParameter], amaxes: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Amaxes of blocks, and of two levels that of the whole weight, over all ranks that share their scales.

    Tensor parallelism cuts no blocks of two levels, so of these its ranks send the amax of the whole weight alone.
    """
    two_levels = [index for index, weight in enumerate(weights) if weight.quantizer.has_outer_scale()]
    found = [*amaxes, *(weights[index].outer_amax_of(amaxes[index]) for index in two_levels)]
    ranks = [*map(_share_blocks, weights), *(_share_outer(weights[index]) for index in two_levels)]
    outer = [None if weight.quantizer.has_outer_scale() else weight.outer for weight in weights]
    for groups in (ranks, [*outer, *(weights[index].outer for index in two_levels)]):
        found = all_reduce_amaxes(found, [() if group is None else (group,) for group in groups])
    of_whole = dict(zip(two_levels, found[len(amaxes) :], strict=True))
    return found[: len(amaxes)], [of_whole.get(index) for index in range(len(amaxes))]


def _scales(weight: QuantizedParameter, amax: Tensor, outer_amax: Tensor | None) -> Scales:
    """Multiplier and scales of all its blocks, of their amaxes; or, of delayed scaling, of those before."""
    if outer_amax is not None:
        return weight.two_scales_of(amax, outer_amax)
    if not isinstance(weight.quantizer, DelayedScaling):
        return *ops.scale(amax, weight.quantizer), None
    _, multiplier = weight.row()
    multiplier = multiplier.view(amax.shape)
    return multiplier, weight.quantizer.scale_of(multiplier), None


@dataclass(frozen=True)
class _Anew:
    """What a weight becomes by new values: codes, scales, and the amaxes of which they are made."""

    codes: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    amax: Tensor


def quantized_anew(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
    rounding: Sequence[Quantizer] | None = None,
    cuts: Sequence[Sharding] | None = None,
) -> Iterator[_Anew]:
    """Codes, scales and amaxes of new values of each weight, one at a time; arguments as of `assign`."""
    quantizers = [weight.quantizer for weight in weights]
    dtypes = dtypes or [value.dtype for value in values]
    amaxes = [w.amax_of(v.to(dtype)) for w, v, dtype in zip(weights, values, dtypes, strict=True)]
    amaxes, outer_amaxes = _over_ranks(weights, amaxes)
    casts = zip(values, dtypes, rounding or quantizers, cuts or [()] * len(quantizers), strict=True)
    for weight, amax, outer_amax, (value, dtype, quantizer, cut) in zip(
        weights, amaxes, outer_amaxes, casts, strict=True
    ):
        multiplier, scale, outer_scale = _scales(weight, amax, outer_amax)
        codes = weight.codes_of(value.to(dtype), multiplier, quantizer, cut)
        yield _Anew(codes, scale, outer_scale, amax)


def _made_by(scale: Tensor) -> tuple[Tensor, ...]:
    """The multipliers one of which a scale was made of: by two roundings it is at most the next number to its own."""
    near = (1.0 / scale.double()).float()
    return near, *(torch.nextafter(near, torch.full_like(near, limit)) for limit in (0.0, torch.inf))


def stand_for(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    rounding: Sequence[Quantizer],
    cuts: Sequence[Sharding],
) -> Iterator[bool]:
    """Whether the codes of each weight are those of these values; arguments as of `assign`."""
    anew = quantized_anew(weights, values, dtypes, rounding, cuts)
    for weight, value, dtype, new in zip(weights, values, dtypes, anew, strict=True):
        if isinstance(weight.quantizer, DelayedScaling):  # the multiplier is another one by now
            every = (ops.cast(value.to(dtype), each, weight.quantizer) for each in _made_by(weight.scale))
            yield any(torch.equal(each, weight.codes) for each in every)
        else:
            same_outer = new.outer_scale is None or torch.equal(new.outer_scale, weight.outer_scale)
            yield torch.equal(new.codes, weight.codes) and torch.equal(new.scale, weight.scale) and same_outer


def count_write(parameter: Tensor) -> None:
    """Let a backward notice that this parameter, or the part of it that a DTensor has, was written to.

    PyTorch compares version counters, and each tensor of a parameter has its own: an eager layer saves the parameter
    for its backward, a compiled one codes and scale.
    """
    local = local_itself(parameter)
    parts = [part for own in local.sets() for part in (own, *own.parts()) if part is not local]
    torch.autograd.graph.increment_version((parameter, local, *parts))


def assign(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
    rounding: Sequence[Quantizer] | None = None,
    cuts: Sequence[Sharding] | None = None,
) -> None:
    """Give weights new values, in place: codes and scales as if they were quantized anew.

    Args:
        weights: Where ranks share their scales, all ranks call this with theirs.
        values: Of each, the same shape, bfloat16, float16 or float32.
        dtypes: What values are rounded to first, one weight at a time; their own by default.
        rounding: What rounds values to codes, if not the weights' own quantizers: of the same format and block.
        cuts: How ranks cut each weight, for rounding that depends on where in the whole a value stands.
    """
    anew = quantized_anew(weights, values, dtypes, rounding, cuts)
    for weight, new in zip(weights, anew, strict=True):
        weight.codes.copy_(new.codes)
        weight.scale.copy_(new.scale)
        if new.outer_scale is not None:
            weight.outer_scale.copy_(new.outer_scale)
        if isinstance(weight.quantizer, DelayedScaling):
            history, _ = weight.row()
            history[0].copy_(new.amax.view(()))  # for the next backward, which makes a multiplier of it
        count_write(weight)
