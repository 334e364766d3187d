"""Write new values to quantized weights; each scale uses the amax over all ranks that share it.

values of each weight --amax--> amaxes --(one maximum over the ranks for all of them)--> scales --> codes, in place
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import ops
from fp8compile._compat import local_itself
from fp8compile.layout.cuts import Sharding
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.collectives import all_reduce_amaxes
from fp8compile.ops.layer.quantize_over_ranks import outer_amax_of, scales_of
from fp8compile.ops.quantization_steps import Scales
from fp8compile.quantizers import DelayedScaling, Quantizer
from fp8compile.tensor.quantized_tensor import has_codes

if TYPE_CHECKING:
    from fp8compile.tensor.quantized_parameter import QuantizedParameter

__all__ = ["assign", "count_write", "shared_with", "stand_for"]


def shared_with(weight: QuantizedParameter, own: Quantized) -> ProcessGroup | None:
    """Return the ranks that share a scale of the codes ``own`` (the outer scale, if it has one), or None."""
    return _share_outer(weight) if own.quantizer.has_outer_scale() else _share_blocks(weight, own)


def _share_outer(weight: QuantizedParameter) -> ProcessGroup | None:
    """Return the ranks that shard a matrix, and so share its outer scale; None if no ranks do."""
    return None if weight.shard_dim is None or weight.shard_dim < weight.batch else weight.group


def _share_blocks(weight: QuantizedParameter, own: Quantized) -> ProcessGroup | None:
    """Return the ranks whose shards share blocks of ``own``, and so scales; None if no ranks do."""
    if weight.group is None or weight.shard_dim is None:
        return None
    return weight.group if own.has_all_scales or weight.block_along(own, weight.shard_dim) == -1 else None


def _over_ranks(sets: Sequence[_Set], amaxes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Reduce ``amaxes``, one for each of ``sets``, over the ranks that share the scales.

    Returns the amaxes of blocks, and each matrix's amax (None with one level of scales). With two levels, tensor
    parallel ranks exchange only the matrices' amaxes, because tensor parallelism never cuts their blocks.
    """
    two_levels = [index for index, each in enumerate(sets) if each.codes.quantizer.has_outer_scale()]
    of_two = ((amaxes[index], sets[index].codes.quantizer, sets[index].weight.batch) for index in two_levels)
    found = [*amaxes, *(outer_amax_of(*each) for each in of_two)]
    ranks = [_share_blocks(each.weight, each.codes) for each in sets]
    ranks += [_share_outer(sets[index].weight) for index in two_levels]
    outer = [None if each.codes.quantizer.has_outer_scale() else each.outer for each in sets]
    outer += [sets[index].outer for index in two_levels]
    for groups in (ranks, outer):
        found = all_reduce_amaxes(found, [() if group is None else (group,) for group in groups])
    of_whole = dict(zip(two_levels, found[len(amaxes) :], strict=True))
    return found[: len(amaxes)], [of_whole.get(index) for index in range(len(amaxes))]


def _scales(each: _Set, amax: Tensor, outer_amax: Tensor | None) -> Scales:
    """Return multipliers (1 / scale), scales and outer scale for the codes ``each``, from their amaxes.

    ``outer_amax`` is the amax of each matrix, or None with one level of scales. With delayed scaling, the multiplier
    comes from the layer's state, once a step has made one.
    """
    quantizer = each.codes.quantizer
    if not isinstance(quantizer, DelayedScaling):
        return scales_of(amax, quantizer, outer_amax=outer_amax, batch=each.weight.batch)
    multiplier = quantizer.multiplier_for_write(*each.weight.row(), amax.view(())).view(amax.shape)
    return multiplier, quantizer.scale_of(multiplier), None


@dataclass(frozen=True)
class _Set:
    """A weight, its codes for one GEMM, and the tensor parallel ranks that share the scale."""

    weight: QuantizedParameter
    codes: Quantized
    outer: ProcessGroup | None


def _quantized_anew(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None,
    rounding: Callable[[Quantizer], Quantizer],
    cuts: Sequence[Sharding] | None,
) -> Iterator[tuple[_Set, Tensor, Quantized, Tensor]]:
    """Quantize new values of weights without writing them; for the arguments see `assign`.

    Yields, for each weight's codes for the output and then for grad_input: the codes to replace, the values, the new
    codes with scales, and the amaxes of these scales.
    """
    dtypes = dtypes or [value.dtype for value in values]
    sets: list[_Set] = []
    given: list[tuple[Tensor, torch.dtype, Sharding]] = []
    for weight, value, dtype, cut in zip(weights, values, dtypes, cuts or [()] * len(weights), strict=True):
        for own, outer in zip(weight.sets(), weight.outer, strict=False):
            sets.append(_Set(weight, own, outer))
            given.append((value, dtype, cut))
    amaxes = [
        each.weight.amax_of(each.codes, value.to(dtype)) for each, (value, dtype, _) in zip(sets, given, strict=True)
    ]
    found = zip(sets, given, *_over_ranks(sets, amaxes), strict=True)
    for each, (value, dtype, cut), amax, outer_amax in found:
        multiplier, scale, outer_scale = _scales(each, amax, outer_amax)
        value = value.to(dtype)
        codes = each.weight.codes_of(each.codes, value, multiplier, rounding(each.codes.quantizer), cut)
        yield each, value, replace(each.codes, codes=codes, scale=scale, outer_scale=outer_scale), amax


def _made_by(scale: Tensor) -> tuple[Tensor, ...]:
    """Return the multipliers whose rounded reciprocal may be ``scale``: 1 / scale and its two float32 neighbours."""
    near = (1.0 / scale.double()).float()
    return near, *(torch.nextafter(near, torch.full_like(near, limit)) for limit in (0.0, torch.inf))


def _are_neighbours(one: Quantized, other: Quantized) -> bool:
    """Whether each two codes are equal, or neighbours of one sign, as stochastic roundings of one value are."""
    fmt = one.quantizer.element_format()
    a, b = (one_a_byte(each.codes, each.quantizer)[0] for each in (one, other))
    numbers = a.int(), b.int()  # sign and magnitude; a step of the magnitude is the next number
    is_near = ((numbers[0] - numbers[1]).abs() <= 1) & ((numbers[0] ^ numbers[1]) < 1 << (fmt.bits - 1))
    return bool((is_near & (fmt.decode(a).isnan() == fmt.decode(b).isnan())).all())


def stand_for(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    rounding: Callable[[Quantizer], Quantizer],
    cuts: Sequence[Sharding],
) -> list[bool]:
    """Return, for each weight, whether quantizing its new values could give its present codes and scales.

    If ``rounding`` makes a quantizer stochastic, any noise counts: each code is one of the two around its value. For
    the arguments see `assign`.
    """
    same = dict.fromkeys(map(id, weights), True)
    for each, value, new, _ in _quantized_anew(weights, values, dtypes, rounding, cuts):
        own, quantizer = each.codes, each.codes.quantizer
        if isinstance(quantizer, DelayedScaling):  # the layer's multiplier has changed since these codes were made
            is_same = any(torch.equal(ops.cast(value, m, quantizer), own.codes) for m in _made_by(own.scale))
        else:
            are_same = [torch.equal(*pair) for pair in zip(new.parts(), own.parts(), strict=True)]
            is_stochastic = rounding(quantizer) != quantizer
            is_same = all(are_same[1:]) and (are_same[0] or (is_stochastic and _are_neighbours(own, new)))
        same[id(each.weight)] &= is_same
    return list(same.values())


def count_write(parameter: Tensor) -> None:
    """Increment the version counters of a parameter or buffer after a write, so that what was made of it is not used.

    A backward then raises, and cached codes of a plain weight are made again. Each tensor has its own counter: the
    parameter, which eager layers save, and its codes and scale, if any, which compiled layers save.
    """
    local: Any = local_itself(parameter)
    parts = local.parts() if has_codes(local) else ()
    torch.autograd.graph.increment_version((parameter, local, *parts))


def assign(
    weights: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
    rounding: Callable[[Quantizer], Quantizer] = lambda quantizer: quantizer,
    cuts: Sequence[Sharding] | None = None,
) -> None:
    """Quantize new values, and write the codes and scales into the weights in place.

    Args:
        weights: The weights. If ranks share their scales, all ranks call this with their shards.
        values: One tensor for each weight, with its shape; bfloat16, float16 or float32.
        dtypes: Dtypes that the values are rounded to first, one for each weight; by default the values' dtypes.
        rounding: Function of a weight's quantizer; returns a quantizer of equal format and block that may round
            differently.
        cuts: How ranks shard each weight, for rounding that depends on a value's place in the whole weight.
    """
    for each, _, new, amax in _quantized_anew(weights, values, dtypes, rounding, cuts):
        for old, part in zip(each.codes.parts(), new.parts(), strict=True):
            old.copy_(part)
        if isinstance(new.quantizer, DelayedScaling):
            history, _ = each.weight.row()
            history[0].copy_(amax.view(()))  # for the next backward, which makes a multiplier of it
    for weight in weights:
        count_write(weight)
