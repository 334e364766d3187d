"""The weight that a layer sees, of codes that FSDP2 gathered for one pass or for both.

FSDP2 gathers into the same memory again and again. Scales get memory of their own, which FSDP2 frees with the weight.
The scales of a set that was not gathered are NaN: whatever multiplied its codes would not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.ops.layer.shards import DimSharding
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.pair import QuantizedPair, Turns
from fp8compile.tensor.quantized import QuantizedTensor
from fp8compile.tensor.scale_without_values import scale_without_values

__all__ = ["Meaning", "OwnCodes", "as_sent", "fill", "made_of", "sent_of"]

PAIR = GEMMS[:2]  # output and grad_input


@dataclass(frozen=True)
class OwnCodes:
    """One set of a rank's codes.

    Attributes:
        gemm: The product that multiplies them.
        codes: uint8, of the shard, as `Meaning.quantizers` lay them down.
        scale: Of all blocks; or of this rank's alone, if they travel beside the codes.
        travels: Whether they do.
        outer_scale: Of the whole weight, where there are two levels of scales; else None.
    """

    gemm: Gemm
    codes: Tensor
    scale: Tensor
    travels: bool
    outer_scale: Tensor | None = None


@dataclass(frozen=True)
class Meaning:
    """What the tensors that arrive mean.

    Attributes:
        sets: What this rank sent.
        ranks: How many there are.
        size: Of the weight that they have together.
        quantizers: Of the codes for the output and of those for grad_input, as they travel.
        scale_shapes: Of the scales of all blocks, of each.
    """

    sets: tuple[OwnCodes, ...]
    ranks: int
    size: tuple[int, ...]
    quantizers: tuple[Quantizer, Quantizer]
    scale_shapes: tuple[tuple[int, ...], tuple[int, ...]]


def as_sent(local: Tensor, shards: DimSharding) -> Tensor:
    """What a rank has, as long as every rank's message."""
    padding = max(shards.sizes) - shards.length  # of rows alone: FSDP2 cuts other dims into equal parts
    local = pad(local, (*(0, 0) * (local.ndim - 1), 0, padding)) if padding else local
    return local.contiguous()


def sent_of(sets: Sequence[OwnCodes], shards: DimSharding, room: int) -> tuple[Tensor, ...]:
    """What FSDP2 is to send: codes of each set, and scales that travel in one row of bytes.

    Args:
        sets: This rank's.
        shards: How ranks cut the weight. For one rank alone, FSDP2 takes one tensor.
        room: Bytes for scales in every gather, for FSDP2's buffers don't change; 0 if none travel.
    """
    sent = [as_sent(own.codes, shards) for own in sets]
    sent = [torch.cat([each.flatten() for each in sent])] if len(shards.sizes) == 1 else sent
    if room:
        rows = [own.scale.contiguous().flatten().view(torch.uint8) for own in sets if own.travels]
        row = torch.cat([sent[0].new_empty(0), *rows])
        sent.append(pad(row, (0, room - row.numel())))
    return tuple(sent)


def _arrived(gathered: tuple[Tensor, ...], meaning: Meaning) -> dict[Gemm, Tensor]:
    """Scales of all blocks of the sets that were gathered."""
    found, start = {}, 0
    for own in meaning.sets:
        found[own.gemm] = own.scale
        if own.travels:
            rows = gathered[-1].view(meaning.ranks, -1)[:, start : start + own.scale.nbytes]
            start += own.scale.nbytes
            found[own.gemm] = rows.clone(memory_format=torch.contiguous_format).view(own.scale.dtype)
    return found


def fill(pair: QuantizedPair, gathered: tuple[Tensor, ...], meaning: Meaning) -> None:
    """Give a weight the scales of the codes that were gathered into its memory."""
    arrived = _arrived(gathered, meaning)
    if _is_alone_with_both(meaning):
        codes = pair.for_grad_input.codes
        _write(codes, gathered[0].view(2, -1)[1].view(codes.shape))
    outer_scales = {own.gemm: own.outer_scale for own in meaning.sets}
    for gemm, own in zip(PAIR, pair.sets(), strict=True):
        nan = scale_without_values(own.quantizer, (), torch.nan, own.scale.device)
        scale = arrived[gemm].view(own.scale.shape) if gemm in arrived else nan
        _write(own.scale, scale)
        if own.quantizer.has_outer_scale():
            _write(own.outer_scale, outer_scales.get(gemm, torch.full((1,), torch.nan, device=own.scale.device)))
    if pair.turns is not None:
        pair.turns.gemm = meaning.sets[0].gemm.name


def _write(memory: Tensor, values: Tensor) -> None:
    """As FSDP2 writes what it gathers: autograd, which saved a weight in the forward, is not to count it."""
    with _compat.uncounted_write(memory):
        memory.copy_(values)


def _is_alone_with_both(meaning: Meaning) -> bool:
    """Whether one tensor brings both sets: FSDP2 takes no other from a rank that has all of a weight."""
    return meaning.ranks == 1 and len(meaning.sets) == 2


def _memories(gathered: tuple[Tensor, ...], meaning: Meaning) -> tuple[Tensor, Tensor]:
    """Where the codes for the output are, and those for grad_input: memory that FSDP2 gathers into, if it can."""
    if _is_alone_with_both(meaning):  # FSDP2 makes no parameter of a view into the middle
        return gathered[0].view(2, -1)[0], gathered[0].new_empty(gathered[0].numel() // 2)
    return gathered[0], gathered[len(meaning.sets) - 1]


def made_of(
    gathered: tuple[Tensor, ...], meaning: Meaning, turns: Turns, wrap: Callable[..., QuantizedTensor]
) -> tuple[QuantizedPair, tuple[Tensor, ...]]:
    """A weight on the memory of gathered codes, and what of it is memory of its own, without values.

    Args:
        gathered: What FSDP2 gathered, and will gather into.
        meaning: Of it.
        turns: Says whose codes they are, where they are of one pass.
        wrap: Makes one set of codes, scale, quantizer and, of two levels, ``outer_scale``.
    """
    sets, own = [], []
    with torch.inference_mode(mode=False):  # later gathers write to it, under whatever mode
        memories = _memories(gathered, meaning)
        own += [memories[1]] if _is_alone_with_both(meaning) else []
        for memory, quantizer, shape in zip(memories, meaning.quantizers, meaning.scale_shapes, strict=True):
            scale = torch.empty(shape, dtype=quantizer.scale_dtype(), device=memory.device)
            rows, *others = quantizer.codes_shape(meaning.size)
            codes = memory.view(-1, *others)[:rows]  # behind the last row there may be padding
            outer = [torch.empty(1, device=memory.device)] if quantizer.has_outer_scale() else []
            sets.append(wrap(codes, scale, quantizer, **({"outer_scale": outer[0]} if outer else {})))
            own += [scale, *outer]
    return QuantizedPair(*sets, turns if len(meaning.sets) == 1 else None), tuple(own)
