"""Updates of quantized weights: values in, codes and scale out, with the amax of all ranks that share a scale.

values of each weight --amax--> amaxes --(one maximum over the ranks for all of them)--> scales --> codes, in place
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import ops
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.quantizers import Quantizer
from fp8compile.tensor.quantized import QuantizedTensor

__all__ = ["assign"]


def _shared_with(weight: QuantizedTensor) -> ProcessGroup | None:
    """The ranks that have elements of the same blocks, if there are any."""
    if weight.group is None or weight.shard_dim is None:
        return None
    block = weight.quantizer.block[int(weight.shard_dim == weight.ndim - 1)]
    return weight.group if block == -1 else None


def _over_ranks(amaxes: list[Tensor], groups: list[ProcessGroup | None]) -> list[Tensor]:
    """Each amax over its group, with one message for all those of a group."""
    found = list(amaxes)
    for group in dict.fromkeys(group for group in groups if group is not None):
        members = [index for index, each in enumerate(groups) if each is group]
        reduced = all_reduce_amax(torch.cat([amaxes[index].flatten() for index in members]), group)
        for index, part in zip(members, reduced.split([amaxes[index].numel() for index in members]), strict=True):
            found[index] = part.view(amaxes[index].shape)
    return found


def assign(
    weights: Sequence[QuantizedTensor], values: Sequence[Tensor], rounding: Sequence[Quantizer] | None = None
) -> None:
    """Give weights new values, in place: codes and scales as if they were quantized anew.

    Args:
        weights: None a shard that cuts blocks. Where ranks share their scales, all ranks call this with theirs.
        values: Of each, the same shape, bfloat16, float16 or float32.
        rounding: What rounds values to codes, if not the weights' own quantizers: of the same format and block.
    """
    quantizers = [weight.quantizer for weight in weights]
    amaxes = [ops.amax(value, quantizer) for value, quantizer in zip(values, quantizers, strict=True)]
    amaxes = _over_ranks(amaxes, [_shared_with(weight) for weight in weights])
    for weight, value, amax, own, cast in zip(
        weights, values, amaxes, quantizers, rounding or quantizers, strict=True
    ):
        multiplier, scale = ops.scale(amax, own)
        weight.codes.copy_(ops.cast(value, multiplier, cast))
        weight.scale.copy_(scale)
