"""Prints an explanation in the terminal, as titled tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.box import ASCII2
from rich.console import Console
from rich.table import Table

from fp8compile.cli.explain.sections import Section, sections

if TYPE_CHECKING:
    from fp8compile.testing.explain import Explanation

__all__ = ["print_explanation", "print_sections"]

LOG_WIDTH = 160  # a log has no width of its own


def _table(section: Section) -> Table:
    table = Table(box=ASCII2)
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for number, row in enumerate(section.rows):
        table.add_row(*row, style="bold red" if number in section.loud else None)
    return table


def print_explanation(found: Explanation) -> None:
    """Print all sections of an explanation.

    Args:
        found: The explanation.
    """
    print_sections(sections(found))


def print_sections(shown: Iterable[Section]) -> None:
    """Print titled tables.

    Args:
        shown: The sections, in order.
    """
    # names of layers may look like rich's markup
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    console = Console(**plain)
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH, **plain)
    for number, section in enumerate(shown):
        if number:
            console.print()
        console.print(section.title, style="bold")
        for line_number, line in enumerate(section.lines):
            is_loud = not section.rows and line_number in section.loud
            console.print(line, style="bold red" if is_loud else None, soft_wrap=True)
        if section.rows:
            console.print(_table(section))
