"""Which rows of a parameter each FSDP rank has, as a constant of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from fp8compile.layout.cuts import DimSharding, Sharding
from fp8compile.quantizers.constant import Constant

__all__ = ["Rows", "placed_cuts", "placed_of", "rows_cut"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Rows(Constant):
    """How FSDP shards a parameter by rows: an argument of the ops on sharded parameters.

    Attributes:
        sizes: Number of rows on each rank; ranks may have different numbers, or 0.
        rank: This rank's number.
        group: Name of the group whose ranks shard the rows; empty for one rank.
        replicas: Name of the group whose ranks have the same rows (HSDP), or empty.
        reduce_dtype: Name of the dtype in which gradients are reduced.
        placed: How tensor parallel ranks shard the parameter before FSDP, as ints (`placed_of`); () if unsharded.
    """

    sizes: tuple[int, ...]
    rank: int
    group: str
    replicas: str
    reduce_dtype: str
    placed: tuple[int, ...] = ()

    @staticmethod
    def alone(rows: int, reduce_dtype: str = "float32") -> Rows:
        """Return the `Rows` of an unsharded parameter; gradients are reduced in the dtype named ``reduce_dtype``."""
        return Rows(sizes=(rows,), rank=0, group="", replicas="", reduce_dtype=reduce_dtype)


def rows_cut(rows: Rows) -> DimSharding | None:
    """Return FSDP's sharding of a parameter along dim 0; None for a group of one rank."""
    return None if len(rows.sizes) == 1 else DimSharding(rows.group, rows.rank, 0, rows.sizes)


def placed_of(cuts: Sharding) -> tuple[int, ...]:
    """Flatten a weight's shardings over tensor parallel ranks to ints, for ``Rows.placed``.

    A mesh dim that does not shard the weight gives -1. Otherwise it gives the sharded dim, this rank's number, the
    number of ranks, and the size of each shard.
    """
    found: list[int] = []
    for cut in cuts:
        found += [-1] if cut is None else [cut.dim, cut.rank, len(cut.sizes), *cut.sizes]
    return tuple(found)


def placed_cuts(placed: Sequence[int], groups: Sequence[ProcessGroup | str] = ()) -> Sharding:
    """Turn ``Rows.placed`` back into shardings, one for each mesh dim, over ``groups`` if these are given."""
    cuts: list[DimSharding | None] = []
    rest = list(placed)
    while rest:
        if rest[0] == -1:
            rest = rest[1:]
            cuts.append(None)
            continue
        dim, rank, ranks = rest[:3]
        group = groups[len(cuts)] if groups else ""
        cuts.append(DimSharding(group, rank, dim, tuple(rest[3 : 3 + ranks])))
        rest = rest[3 + ranks :]
    return tuple(cuts)
