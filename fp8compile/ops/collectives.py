"""Collectives that quantization needs, as nodes of a compiled graph."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fp8compile import _compat, inductor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_amax",
    "all_reduce_amaxes",
    "all_reduce_extreme",
    "all_to_all",
    "reduce_scatter",
    "sent_in_backward",
]

_IN_BACKWARD: ContextVar[bool] = ContextVar("sent_in_backward", default=False)


@contextmanager
def sent_in_backward() -> Iterator[None]:
    """Context in which collectives are marked so that PyTorch's partitioner keeps them in the backward."""
    token = _IN_BACKWARD.set(True)
    try:
        yield
    finally:
        _IN_BACKWARD.reset(token)


def _sent(collective: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a functional collective with ``args`` and wait for its result, in eager mode and in a graph."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    # Dynamo can't trace a ContextVar, and need not: it traces forwards only.
    in_backward = not torch.compiler.is_dynamo_compiling() and _IN_BACKWARD.get()
    with inductor.left_in_backward() if in_backward else nullcontext():
        result = collective(*args)
    return result.wait() if isinstance(result, AsyncCollectiveTensor) else result


@inductor.once_a_graph
def all_reduce_amax(amax: Tensor, group: ProcessGroup | str) -> Tensor:
    """Return the largest amax over the ranks of a group; NaN if any rank has a NaN.

    ``amax`` is nonnegative float32 of any shape. The maximum is taken over the floats' bits as integers, which have
    the same order with NaN last, because gloo's float maximum loses the NaN of another rank.
    """
    from torch.distributed import _functional_collectives as funcol

    # NaN may have a sign bit, from Inductor's reductions on x86, which the `and` clears. Its result is also no view:
    # Inductor (2.13) reduces in place, and fails if the operand is a view of its own buffer as another dtype.
    return _sent(funcol.all_reduce, amax.view(torch.int32) & 0x7FFFFFFF, "max", group).view(torch.float32)


def all_reduce_amaxes(amaxes: Sequence[Tensor], groups: Sequence[Sequence[ProcessGroup | str]]) -> list[Tensor]:
    """Return the maximum of each amax over ranks; amaxes with the same process groups are sent in one message.

    ``groups`` has an entry for each amax: the process groups over which the amax is reduced, one after the other. With
    an empty entry, the amax is returned unchanged.
    """
    found = list(amaxes)
    messages: dict[tuple[ProcessGroup | str, ...], list[int]] = {}
    for index, own in enumerate(groups):
        messages.setdefault(tuple(own), []).append(index)
    for own, indices in messages.items():
        if not own:
            continue
        message = torch.cat([amaxes[index].flatten() for index in indices])
        for group in own:
            message = all_reduce_amax(message, group)
        parts = message.split([amaxes[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            found[index] = part.view(amaxes[index].shape)
    return found


def all_reduce_extreme(x: Tensor, reduction: str, group: ProcessGroup | str) -> Tensor:
    """Return the elementwise maximum or minimum over the ranks of a group; NaN if any rank has a NaN.

    ``reduction`` is ``"max"`` or ``"min"``. ``x`` is float32, bfloat16, float16 or of an integer dtype; the result has
    its shape and dtype.
    """
    from torch.distributed import _functional_collectives as funcol

    if not x.is_floating_point():
        return _sent(funcol.all_reduce, x, reduction, group)
    bits = x.float().view(torch.int32)
    # map floats to integers in the same order, and NaN beyond the last of them; the map is its own inverse
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    beyond = torch.iinfo(torch.int32).max if reduction == "max" else torch.iinfo(torch.int32).min
    ordered = torch.where(x.isnan(), beyond, ordered)
    found = _sent(funcol.all_reduce, ordered, reduction, group)
    values = torch.where(found < 0, found ^ 0x7FFFFFFF, found).view(torch.float32)
    return torch.where(found == beyond, torch.nan, values).to(x.dtype)


def all_reduce(x: Tensor, reduction: str, group: ProcessGroup | str) -> Tensor:
    """Sum or average ``x`` over ranks, in its shape and dtype; ``reduction`` is ``"sum"`` or ``"avg"``."""
    from torch.distributed import _functional_collectives as funcol

    return _sent(funcol.all_reduce, x, reduction, group)


def all_to_all(
    x: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: ProcessGroup | str
) -> Tensor:
    """Exchange entries along dim 0 between ranks; return the received entries, in the order of ranks.

    ``x`` has the entries in the order of the ranks that get them. ``sent`` has the number of entries for each rank,
    ``received`` the number from each rank; both are None if all these numbers are equal.
    """
    from torch.distributed import _functional_collectives as funcol

    return _sent(funcol.all_to_all_single, x.contiguous(), received, sent, group)


def _along(dim: int, before: int, after: int, ndim: int) -> tuple[int, ...]:
    return (0, 0) * (ndim - 1 - dim) + (before, after)


@inductor.once_a_graph
def all_gather(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup | str) -> Tensor:
    """Concatenate the shards of all ranks along ``dim`` to a contiguous tensor.

    ``sizes`` has the size of each rank's shard along ``dim``; sizes may differ and be 0.
    """
    dim, largest = dim % x.ndim, max(sizes)
    if all(size == largest for size in sizes):
        return _sent(_compat.all_gather_single, x.contiguous(), dim, group)
    # messages must have the same size on all ranks
    padded = pad(x, _along(dim, 0, largest - x.shape[dim], x.ndim)).contiguous()
    gathered = _sent(_compat.all_gather_single, padded, dim, group)
    parts = [gathered.narrow(dim, rank * largest, size) for rank, size in enumerate(sizes)]
    return torch.cat(parts, dim)


def reduce_scatter(
    x: Tensor, reduction: str, dim: int, sizes: Sequence[int], rank: int, group: ProcessGroup | str
) -> Tensor:
    """Sum or average ``x`` over ranks, and return this rank's shard along ``dim``.

    ``reduction`` is ``"sum"`` or ``"avg"``. ``rank`` is this rank's number. ``sizes`` has the size of each rank's
    shard along ``dim``; sizes may differ and be 0.
    """
    dim, largest = dim % x.ndim, max(sizes)
    if any(size != largest for size in sizes):
        parts = x.split(list(sizes), dim)
        x = torch.cat([pad(part, _along(dim, 0, largest - part.shape[dim], x.ndim)) for part in parts], dim)
    part = _sent(_compat.reduce_scatter_single, x.contiguous(), reduction, dim, group)
    return part.narrow(dim, 0, sizes[rank])
