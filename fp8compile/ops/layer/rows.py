"""Rows: which rows of a parameter each rank has, and of whom its ops get the others; a constant of the graph.

A weight is cut once by each dim of the mesh of tensor parallel ranks, if there are any, and then by rows over the
ranks of FSDP. The cuts of the former are numbers here: for each dim of that mesh -1, or the weight's dim that it cuts,
this rank's number, how many ranks there are, and what each of them has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from fp8compile.layout.cuts import DimSharding, Sharding
from fp8compile.quantizers.constant import Constant

__all__ = ["Rows", "placed_cuts", "placed_of", "rows_cut"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Rows(Constant):
    """What the ops of sharded parameters take behind their tensors.

    Attributes:
        sizes: Rows that each rank has; they may differ and be 0.
        rank: This one's number among them.
        group: Name of their group; empty for one rank.
        replicas: Name of the group whose ranks have the same rows (HSDP), or empty.
        reduce_dtype: Name of the dtype of gradients on their way.
        placed: How tensor parallel ranks cut the parameter before its rows are, as `placed_of` has it; empty without
            such ranks.
    """

    sizes: tuple[int, ...]
    rank: int
    group: str
    replicas: str
    reduce_dtype: str
    placed: tuple[int, ...] = ()

    @staticmethod
    def alone(rows: int, reduce_dtype: str = "float32") -> Rows:
        """All rows, of one rank."""
        return Rows(sizes=(rows,), rank=0, group="", replicas="", reduce_dtype=reduce_dtype)


def rows_cut(rows: Rows) -> DimSharding | None:
    """How FSDP cuts the rows that a rank would have; None for a group of one rank."""
    return None if len(rows.sizes) == 1 else DimSharding(rows.group, rows.rank, 0, rows.sizes)


def placed_of(cuts: Sharding) -> tuple[int, ...]:
    """Cuts of tensor parallel ranks as numbers."""
    found: list[int] = []
    for cut in cuts:
        found += [-1] if cut is None else [cut.dim, cut.rank, len(cut.sizes), *cut.sizes]
    return tuple(found)


def placed_cuts(placed: Sequence[int], groups: Sequence[ProcessGroup | str] = ()) -> Sharding:
    """Numbers as cuts; those of no group where none are given."""
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
