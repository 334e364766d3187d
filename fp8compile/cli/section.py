"""A titled table, as the terminal and the page show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8compile.tables import Cell

__all__ = ["Section"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A title, lines of text, a table.

    Attributes:
        title: What it answers.
        lines: Above the table.
        columns: Headings; empty where there is no table.
        rows: Cells.
        loud: Rows that must not be overlooked, by number; of a section without a table, lines.
        numbers: Columns of numbers, which are aligned to the right.
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Cell, ...]] = ()
    loud: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()
