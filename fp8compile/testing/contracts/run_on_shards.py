"""Runs an op on shards, cut by its sharding rule, in one process; compares with a run on whole arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.registry import Op
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.testing.bits import difference, results, sum_difference

__all__ = ["ShardCheck", "check_shards", "splits_of"]

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,  # keeps a NaN of any rank, unlike gloo's maximum
    "min": torch.minimum,
    "sum": torch.add,
}
RANKS = (2, 3)


class ShardCheck:
    """Outcome of running an op on shards, by each split (a way to cut arguments) of its sharding rule.

    Attributes:
        ran: Number of splits that ran with the right results.
        wrong: Description of the first failure; None if there is none.
    """

    def __init__(self) -> None:
        self.ran = 0
        self.wrong: str | None = None


def splits_of(op: Op, args: tuple[Any, ...]) -> list[Split]:
    """The ways to shard these arguments, called splits, that an op's sharding rule returns."""
    assert op.sharding is not None, f"{op.name} has no sharding rule"
    shapes = (torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args)
    return list(op.sharding(*shapes))


def _units(tensor: Tensor, cut: Cut) -> int:
    return -(-tensor.shape[cut.dim] // cut.unit)


def _shard(arg: Any, cut: Cut | None, first: int, last: int) -> Any:
    if cut is None:
        return arg
    size = arg.shape[cut.dim]
    start, end = min(first * cut.unit, size), min(last * cut.unit, size)
    return arg.narrow(cut.dim, start, end - start)


def _whole(parts: list[Tensor], how: int | str | None) -> Tensor:
    if isinstance(how, str):
        whole = parts[0]
        for part in parts[1:]:
            whole = REDUCE[how](whole, part)
        return whole
    return torch.cat(parts, how) if how is not None else parts[-1]


def _wrong_split(split: Split, args: tuple[Any, ...]) -> str | None:
    if len(split.inputs) != len(args):
        return f"it has {len(split.inputs)} inputs, but the op has {len(args)} arguments"
    for arg, cut in zip(args, split.inputs, strict=True):
        if cut is not None and not (isinstance(arg, Tensor) and -arg.ndim <= cut.dim < arg.ndim):
            return f"{cut} is for {tuple(arg.shape) if isinstance(arg, Tensor) else arg!r}"
    counts = {_units(arg, cut) for arg, cut in zip(args, split.inputs, strict=True) if cut is not None}
    if len(counts) != 1:
        return f"its sharded arguments have {sorted(counts)} units; all must have the same number"
    return None


def _wrong_run(op: Op, split: Split, args: tuple[Any, ...], whole: tuple[Tensor, ...], ranks: int) -> str | None:
    units = next(_units(arg, cut) for arg, cut in zip(args, split.inputs, strict=True) if cut is not None)
    per_rank = -(-units // ranks)
    shards = []
    for rank in range(ranks):
        first, last = min(rank * per_rank, units), min((rank + 1) * per_rank, units)
        local = tuple(_shard(arg, cut, first, last) for arg, cut in zip(args, split.inputs, strict=True))
        shards.append(results(op.overload(*local)))
    if len(split.outputs) != len(whole):
        return f"it has {len(split.outputs)} outputs, but the op returns {len(whole)}"
    for index, (how, expected) in enumerate(zip(split.outputs, whole, strict=True)):
        parts = [shard[index] for shard in shards]
        try:
            differs = (difference if split.exact else sum_difference)(_whole(parts, how), expected)
        except (RuntimeError, IndexError) as error:
            differs = f"results of shapes {[tuple(part.shape) for part in parts]} can't be concatenated: {error}"
        if differs is not None:
            return f"on {ranks} ranks, result {index}: {differs}"
    return None


def check_shards(op: Op, args: tuple[Any, ...]) -> ShardCheck:
    """Run an op on 2 and 3 shards by each split of its sharding rule, and compare with the whole result.

    Args:
        op: An op with a sharding rule.
        args: Arguments of the op.
    """
    found = ShardCheck()
    whole = results(op.overload(*args))
    for split in splits_of(op, args):
        reason = _wrong_split(split, args)
        for ranks in () if reason else RANKS:
            reason = reason or _wrong_run(op, split, args, whole, ranks)
        if reason:
            shapes = ", ".join(str(tuple(a.shape)) if isinstance(a, Tensor) else repr(a) for a in args)
            found.wrong = f"{split} for ({shapes}): {reason}"
            return found
        found.ran += 1
    return found
