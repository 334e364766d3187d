"""Prints sections (a title, lines of text and a table) in the terminal, fitted to its width."""

from __future__ import annotations

from collections.abc import Iterable

from fp8compile.cli.section import Section
from fp8compile.cli.style import Style
from fp8compile.tables import paragraph, table_lines, terminal_width

__all__ = ["print_section", "print_sections"]


def _lines(section: Section, width: int, style: Style) -> Iterable[str]:
    yield style.bold(section.title)
    for number, line in enumerate(section.lines):
        is_loud = not section.rows and number in section.loud
        yield from map(style.alarm if is_loud else str, paragraph(line, width=width))
    if section.rows:
        yield from table_lines(
            section.columns, section.rows, width=width, right=section.numbers, loud=section.loud, mark=style.alarm,
            head=style.bold,
        )  # fmt: skip


def print_section(section: Section) -> None:
    """Print a section, followed by an empty line."""
    print("\n".join([*_lines(section, terminal_width(), Style()), ""]), flush=True)


def print_sections(shown: Iterable[Section]) -> None:
    """Print sections, one after another."""
    for section in shown:
        print_section(section)
