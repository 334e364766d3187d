"""Combine statistics of observed layers over all ranks, with one sum and one maximum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile import _compat
from fp8compile.monitor.observe import Observer
from fp8compile.ops.collectives import all_reduce, all_reduce_extreme

__all__ = ["agreed", "num_ranks", "over_ranks", "rank"]

Totals = tuple[Tensor, Tensor]  # sums and maxima


def num_ranks() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    return dist.get_world_size() if _compat.has_process_groups() else 1


def rank() -> int:
    """Return this process's rank in the default process group; 0 without a group."""
    return dist.get_rank() if num_ranks() > 1 else 0


def agreed(matrices: Mapping[str, int], how: Mapping[str, Any]) -> dict[str, int]:
    """Return {layer: number of matrices} for the layers of all ranks; all ranks call this once.

    ``how`` has the arguments of the monitor that must be the same on all ranks.

    Raises:
        ValueError: On all ranks, if ranks have different arguments, or a layer with different numbers of matrices.
    """
    if num_ranks() == 1:
        return dict(matrices)
    every: list[Any] = [None] * num_ranks()
    dist.all_gather_object(every, (dict(matrices), dict(how)))
    union: dict[str, int] = {}
    for rank, (own, given) in enumerate(every):
        if given != every[0][1]:
            raise ValueError(
                f"Monitor: arguments must be equal on all ranks, got {every[0][1]} on rank 0 and {given} on rank "
                f"{rank}."
            )
        for name, count in own.items():
            if union.setdefault(name, count) != count:
                raise ValueError(
                    f"Monitor: layer {name} has {count} expert matrices on rank {rank}, but {union[name]} on another "
                    "rank, so their statistics can't be reduced together. Build the same model on all ranks, with "
                    "the same number of experts per rank."
                )
    return union


def over_ranks(observers: Mapping[str, Observer], matrices: Mapping[str, int]) -> dict[str, Totals]:
    """Return the sums and the maxima over all ranks of each layer's statistics.

    ``observers`` are the statistics buffers of this rank's layers; ``matrices`` is the result of `agreed`.
    """
    if num_ranks() == 1:
        return {name: (each.sums, each.maxima) for name, each in observers.items()}
    like = next(iter(observers.values()))
    own = {
        name: observers.get(name) or Observer.empty(like.totals, max(n, 1), like.sums.device)
        for name, n in matrices.items()
    }
    group: Any = dist.group.WORLD
    sums = all_reduce(torch.cat([each.sums.flatten() for each in own.values()]), "sum", group)
    maxima = all_reduce_extreme(torch.cat([each.maxima.flatten() for each in own.values()]), "max", group)
    return {
        name: (one.view_as(each.sums), other.view_as(each.maxima))
        for (name, each), one, other in zip(
            own.items(),
            _split(sums, [e.sums for e in own.values()]),
            _split(maxima, [e.maxima for e in own.values()]),
            strict=True,
        )
    }


def _split(flat: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    return flat.split([each.numel() for each in like])
