"""The weight that a layer sees, of codes that FSDP2 gathered for one pass or for both.

FSDP2 gathers into the same memory again and again. Scales get memory of their own, which FSDP2 frees with the weight.
The scales of a set that was not gathered are NaN: whatever multiplied its codes would not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.shapes import codes_shape
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.pair import QuantizedPair, Turns
from fp8compile.tensor.quantized import QuantizedTensor
from fp8compile.tensor.scale_without_values import scale_without_values

__all__ = ["Meaning", "OwnCodes", "OwnScale", "as_sent", "fill", "made_of", "room_for", "sent_of"]

Shapes = tuple[tuple[int, ...], ...]
PAIR = GEMMS[:2]  # output and grad_input


@dataclass(frozen=True)
class OwnScale:
    """One level of the scales of a rank's codes: of blocks, or the outer ones.

    Attributes:
        values: Of the whole weight; or of this rank's shard alone, if they travel beside the codes.
        travels: Whether they do.
    """

    values: Tensor
    travels: bool


@dataclass(frozen=True)
class OwnCodes:
    """One set of a rank's codes.

    Attributes:
        gemm: The product that multiplies them.
        codes: uint8, of the shard, as `Meaning.quantizers` lay them down.
        scales: Of blocks, and where there are two levels the outer ones.
    """

    gemm: Gemm
    codes: Tensor
    scales: tuple[OwnScale, ...]

    def row(self) -> Iterable[Tensor]:
        """Bytes of the scales that travel."""
        return (each.values.contiguous().flatten().view(torch.uint8) for each in self.scales if each.travels)


@dataclass(frozen=True)
class Meaning:
    """What the tensors that arrive mean.

    Attributes:
        sets: What this rank sent, without the codes.
        ranks: How many there are.
        size: Of the weight that they have together.
        quantizers: Of the codes for the output and of those for grad_input, as they travel.
        scale_shapes: Of the scales of the whole weight, of each set those of all levels.
    """

    sets: tuple[OwnCodes, ...]
    ranks: int
    size: tuple[int, ...]
    quantizers: tuple[Quantizer, Quantizer]
    scale_shapes: tuple[Shapes, Shapes]


def without_codes(sets: Iterable[OwnCodes]) -> tuple[OwnCodes, ...]:
    """What a rank sent, without the codes: it may be kept until the backward, and codes are a byte an element."""
    return tuple(replace(own, codes=own.codes.new_empty(0)) for own in sets)


def as_sent(local: Tensor, shards: DimSharding) -> Tensor:
    """What a rank has, as long as every rank's message."""
    padding = max(shards.sizes) - shards.length  # of rows alone: FSDP2 cuts other dims into equal parts
    local = pad(local, (*(0, 0) * (local.ndim - 1), 0, padding)) if padding else local
    return local.contiguous()


def room_for(sizes: Iterable[int], *, together: bool) -> int:
    """Bytes for the scales that travel in a gather, of both sets or of the one that has more of them.

    Args:
        sizes: Bytes of those of each set.
        together: Whether both sets travel in one gather.
    """
    return sum(sizes) if together else max(sizes, default=0)


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
        row = torch.cat([sent[0].new_empty(0), *(each for own in sets for each in own.row())])
        sent.append(pad(row, (0, room - row.numel())))
    return tuple(sent)


def _arrived(gathered: tuple[Tensor, ...], meaning: Meaning) -> dict[Gemm, list[Tensor]]:
    """Scales of the whole weight, of all levels, of the sets that were gathered."""
    found: dict[Gemm, list[Tensor]] = {}
    start = 0
    for own in meaning.sets:
        found[own.gemm] = []
        for scale in own.scales:
            values = scale.values
            if scale.travels:
                rows = gathered[-1].view(meaning.ranks, -1)[:, start : start + values.nbytes]
                start += values.nbytes
                values = rows.clone(memory_format=torch.contiguous_format).view(values.dtype)
            found[own.gemm].append(values)
    return found


def _without_values(own: QuantizedTensor) -> list[Tensor]:
    """NaN for scales of all levels of a set whose codes were not gathered."""
    _, *scales = own.parts()
    device = own.scale.device
    levels = scale_without_values(own.quantizer, (), torch.nan, device), torch.full((), torch.nan, device=device)
    return [level.expand(scale.shape) for level, scale in zip(levels, scales, strict=False)]


def fill(pair: QuantizedPair, gathered: tuple[Tensor, ...], meaning: Meaning) -> None:
    """Give a weight the scales of the codes that were gathered into its memory."""
    arrived = _arrived(gathered, meaning)
    if _is_alone_with_both(meaning):
        codes = pair.for_grad_input.codes
        _write(codes, gathered[0].view(2, -1)[1].view(codes.shape))
    for gemm, own in zip(PAIR, pair.sets(), strict=True):
        _, *memories = own.parts()
        values = arrived[gemm] if gemm in arrived else _without_values(own)
        for memory, each in zip(memories, values, strict=True):
            _write(memory, each.view(memory.shape))
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
        wrap: Makes one set of codes, scale, quantizer and ``outer_scale``, None of one level.
    """
    sets, own = [], []
    with torch.inference_mode(mode=False):  # later gathers write to it, under whatever mode
        memories = _memories(gathered, meaning)
        own += [memories[1]] if _is_alone_with_both(meaning) else []
        for memory, quantizer, (shape, *outer) in zip(memories, meaning.quantizers, meaning.scale_shapes, strict=True):
            scale = torch.empty(shape, dtype=quantizer.scale_dtype(), device=memory.device)
            outer_scale = torch.empty(outer[0], device=memory.device) if outer else None
            rows, *others = codes_shape(meaning.size, quantizer)
            codes = memory.view(-1, *others)[:rows]  # behind the last row there may be padding
            sets.append(wrap(codes, scale, quantizer, outer_scale=outer_scale))
            own += [scale] if outer_scale is None else [scale, outer_scale]
    return QuantizedPair(*sets, turns if len(meaning.sets) == 1 else None), tuple(own)
