"""Run registered ops, of this and other libraries, on DTensors by their sharding rules.

For each mesh dim, the `Split` (a strategy to shard arguments and results) that gathers the fewest bytes is chosen. A
maximum over ranks is reduced at once, because gloo's reduction of ``Partial("max")`` would lose other ranks' NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from fp8compile.layout.cuts import DimSharding, chunk_sizes
from fp8compile.layout.quantized import Plain
from fp8compile.ops.collectives import all_reduce_extreme
from fp8compile.ops.layer.gather_operands import gather, narrow
from fp8compile.ops.registry import Op
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.parallel.dtensor_placements import check_one_mesh, part_of, whole_of

__all__ = ["dispatch_by_rule"]


def _units(cut: DimSharding, unit: int) -> tuple[int, ...] | None:
    end = 0
    for size in cut.sizes:
        end += size
        if end % unit and end != cut.total:
            return None
    return tuple(-(-size // unit) for size in cut.sizes)


@dataclass(frozen=True)
class ShardingStrategy:
    """How an op runs over the ranks of one mesh dim.

    ``cost`` is the number of gathered bytes; ``outputs`` says how results are sharded.
    """

    # For each argument, the dim along which it has to be cut, and the number of elements that stay together (a unit).
    # None if each rank needs all of the argument.
    wanted: tuple[Cut | None, ...]
    outputs: tuple[int | str | None, ...]  # how results lie, as ``Split.outputs`` says
    gathered: frozenset[int]  # indices of the arguments that are gathered before the op runs
    units: tuple[int, ...]  # number of such units of each cut argument that each rank then has
    cost: int  # number of bytes that are gathered


def _strategy(split: Split, parts: Sequence[Any], index: int, ranks: int) -> ShardingStrategy:
    gathered, units, cost = set(), None, 0
    for place, (part, cut) in enumerate(zip(parts, split.inputs, strict=True)):
        has = None if part is None else part.cuts[index]
        if has is None:
            continue
        own = _units(has, cut.unit) if cut is not None and cut.dim % part.local.ndim == has.dim else None
        if own is None or units not in (None, own):
            gathered.add(place)
            # the whole's bytes, which all ranks count alike; by their parts' bytes they might choose differently
            cost += part.local.element_size() * math.prod(part.whole_shape(index))
        else:
            units = own
    if units is None and any(split.inputs):
        place, cut = next((place, cut) for place, cut in enumerate(split.inputs) if cut is not None)
        shape = parts[place].whole_shape(index)
        units = chunk_sizes(-(-shape[cut.dim] // cut.unit), ranks)
    return ShardingStrategy(split.inputs, split.outputs, frozenset(gathered), units or (), cost)


def _prepared(
    part: Plain, cut: Cut | None, strategy: ShardingStrategy, place: int, index: int, mesh: DeviceMesh
) -> Plain:
    if place in strategy.gathered:
        part = gather(part, index)
    if cut is None or part.cuts[index] is not None:
        return part
    dim = cut.dim % part.local.ndim
    total, ends = part.whole_shape(index)[dim], [0]
    for count in strategy.units:
        ends.append(min(ends[-1] + count * cut.unit, total))
    sizes = tuple(end - start for start, end in pairwise(ends))
    return narrow(part, index, DimSharding(mesh.get_group(index), mesh.get_local_rank(index), dim, sizes))


def _whole_shapes(op: Op, args: Sequence[Any]) -> list[torch.Size]:
    """Return the shapes that the op's results have on whole tensors with the shapes of ``args``."""
    with _disable_current_modes():
        metas = [torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args]
        found = op.fake(*metas)
    return [result.shape for result in (found if isinstance(found, tuple) else (found,))]


def dispatch_by_rule(op: Op, args: Sequence[Any]) -> DTensor | tuple[DTensor, ...]:
    """Run an op on DTensors by its sharding rule; all tensors among ``args`` are on one mesh.

    Raise a TypeError if the op has no sharding rule or a tensor is plain, and a ValueError for different meshes.
    """
    if op.sharding is None:
        raise TypeError(
            f"{op.name} does not support DTensors, because it was registered with sharding=None. Pass full tensors "
            "(.full_tensor(), or .to_local() if replicated)."
        )
    mesh = check_one_mesh(op.name, {f"argument {place}": a for place, a in enumerate(args) if isinstance(a, Tensor)})
    parts = [part_of(op.name, a) if isinstance(a, DTensor) else None for a in args]
    strategies = []
    for index in range(mesh.ndim):
        shapes = [
            a if part is None else torch.empty(part.whole_shape(index), dtype=a.dtype, device="meta")
            for part, a in zip(parts, args, strict=True)
        ]
        everything = Split((None,) * len(args), (None,) * len(op.overload._schema.returns))
        splits = [everything, *op.sharding(*shapes)]
        strategy = min(
            (_strategy(split, parts, index, mesh.size(index)) for split in splits), key=lambda each: each.cost
        )
        parts = [
            None if part is None else _prepared(part, cut, strategy, place, index, mesh)
            for place, (part, cut) in enumerate(zip(parts, strategy.wanted, strict=True))
        ]
        strategies.append(strategy)
    local = op.overload(*(a if part is None else part.local for part, a in zip(parts, args, strict=True)))
    results = list(local) if isinstance(local, tuple) else [local]
    sizes = _whole_shapes(op, args)
    placed = tuple(
        _placed(result, [strategy.outputs[number] for strategy in strategies], mesh, sizes[number])
        for number, result in enumerate(results)
    )
    return placed if isinstance(local, tuple) else placed[0]


def _placed(local: Tensor, hows: Sequence[int | str | None], mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    placements: list[Placement] = []
    for index, how in enumerate(hows):
        if how in ("max", "min"):
            local = all_reduce_extreme(local, how, mesh.get_group(index))
        if how == "sum":
            placements.append(Partial())
        else:
            placements.append(Shard(how % len(shape)) if type(how) is int else Replicate())
    return whole_of(local, mesh, placements, shape)
