"""A titled table, as the terminal and the HTML page show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8compile.tables import Cell

__all__ = ["Section"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A title, lines of text, and a table.

    Attributes:
        title: The title.
        lines: Lines of text above the table.
        columns: Headings of the columns; empty without a table.
        rows: Rows of cells.
        loud: Indices of the rows that are highlighted; without a table, indices of the lines.
        numbers: Indices of the columns with numbers, which are aligned to the right.
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Cell, ...]] = ()
    loud: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()
