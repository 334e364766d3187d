"""Rows: which rows of a parameter each rank has, and of whom its ops get the others; a constant of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.quantizers.constant import Constant

__all__ = ["Rows"]


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
