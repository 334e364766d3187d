"""Section: a titled table, for the terminal and for HTML pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8compile.tables import Cell

__all__ = ["Section"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled table with lines of text above it.

    Attributes:
        title: The title.
        lines: Lines of text above the table.
        columns: Headings of the columns; empty without a table.
        rows: Rows of cells.
        loud: Indices of highlighted rows; without a table, indices of highlighted lines.
        numbers: Indices of columns with numbers, which are right-aligned.
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Cell, ...]] = ()
    loud: frozenset[int] = frozenset()
    numbers: tuple[int, ...] = ()
