"""Position of a rank's shard in a whole tensor, and exchange of shards to fill the whole.

    whole tensor on each rank:  [ own part | empty | empty ]  --each rank broadcasts its part-->  full

Contiguous shards are broadcast in place, others in chunks of rows, so that extra memory is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile.layout.cuts import DimSharding, Sharding

__all__ = ["MESSAGE", "fill", "place_of", "send"]

MESSAGE = 2**19  # bytes of a message from a place that is not contiguous


def place_of(cuts: Sharding, shape: Sequence[int], units: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the slices of a rank's shard in the whole tensor, one per dim.

    Args:
        cuts: How the tensor is sharded, as this rank sees it.
        shape: Shape of the whole tensor.
        units: None for slices of elements. For slices of a grid of scales or of packed codes: how many elements along
            each dim share a scale or a byte; -1 if all share one.
    """
    found = []
    for dim, size in enumerate(shape):
        unit = 1 if units is None else units[dim]
        own = [cut for cut in cuts if cut is not None and cut.dim == dim]
        start, length = sum(cut.start for cut in own), own[-1].length if own else size
        if unit == -1:
            found.append(slice(0, 1))
        elif not length:  # a rank without elements lies behind a block that may be partial
            found.append(slice(0, 0))
        else:
            found.append(slice(start // unit, -(-(start + length) // unit)))
    return tuple(found)


def send(part: Tensor, cut: DimSharding, source: int) -> None:
    """Broadcast ``part`` from the rank number ``source`` of ``cut`` to the other ranks of ``cut``, in place.

    ``part`` may be a view, to which the other ranks write.
    """
    group = _resolve_process_group(cut.group) if isinstance(cut.group, str) else cut.group  # type: ignore[arg-type]
    part = part.view(torch.uint8) if part.element_size() == 1 else part
    part = part.t() if part.ndim == 2 and part.t().is_contiguous() else part
    if part.is_contiguous():
        torch.distributed.broadcast(part, group=group, group_src=source)
        return
    rows = max(1, MESSAGE // max(1, part[0].numel() * part.element_size()))
    buffer = part.new_empty((min(rows, part.shape[0]), *part.shape[1:]))
    for some in part.split(rows):
        message = buffer[: some.shape[0]]
        if cut.rank == source:
            message.copy_(some)
        torch.distributed.broadcast(message, group=group, group_src=source)
        if cut.rank != source:
            some.copy_(message)


def fill(
    whole: Tensor,
    cuts: Sharding,
    shape: Sequence[int],
    units: Sequence[int] | None = None,
    known: Sequence[bool] | None = None,
) -> None:
    """Fill each rank's whole tensor with the shards of the other ranks (collective).

    The caller has written this rank's shard to ``whole``. The innermost sharding is exchanged first, so that each rank
    of an outer sharding can then send a complete part.

    Args:
        whole: The tensor to fill: values, codes or scales.
        cuts: How the values are sharded.
        shape: Shape of the values.
        units: For each dim, how many values share an entry of ``whole``, see `place_of`.
        known: For each dim, whether all ranks have all entries along the dim already; None if for no dim.
    """
    for level in reversed(range(len(cuts))):
        cut = cuts[level]
        if cut is None or (known is not None and known[cut.dim]) or (units is not None and units[cut.dim] == -1):
            continue
        for source in range(len(cut.sizes)):
            place = place_of((*cuts[:level], replace(cut, rank=source)), shape, units)
            place = tuple(slice(None) if known is not None and known[dim] else own for dim, own in enumerate(place))
            if (part := whole[place]).numel():
                send(part, cut, source)
