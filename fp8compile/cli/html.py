"""Builds HTML pages without external scripts, fonts or images; the pages are also well-formed XML."""

from __future__ import annotations

from html import escape
from string import Template

from fp8compile.cli.section import Section
from fp8compile.tables import Cell

__all__ = ["document", "section_html"]

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
$head<title>$title</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
$body
<footer>$footer</footer>
</body>
</html>
""")


def document(title: str, body: str, *, style: str, footer: str, head: str = "") -> str:
    """Return the HTML text of a page, with ``title`` also as its heading.

    ``body`` is HTML below the heading, ``head`` whole lines of HTML before the title, and ``style`` CSS.
    """
    return PAGE.substitute(title=escape(title), body=body, style=style, footer=escape(footer), head=head)


def _cells(tag: str, cells: tuple[Cell, ...]) -> str:
    return "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells)


def _table(section: Section) -> str:
    rows = [f"<tr>{_cells('th', section.columns)}</tr>"]
    for number, row in enumerate(section.rows):
        mark = ' class="loud"' if number in section.loud else ""
        rows.append(f"<tr{mark}>{_cells('td', row)}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(rows) + "\n</table></div>"


def section_html(section: Section, name: str) -> str:
    """Convert a section to HTML; ``name`` is the CSS class of the HTML element."""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    for number, line in enumerate(section.lines):
        mark = ' class="loud"' if not section.rows and number in section.loud else ""
        parts.append(f"<p{mark}>{escape(line)}</p>")
    if section.rows:
        parts.append(_table(section))
    body = "\n".join(parts)
    return f'<section class="{name}">\n{body}\n</section>'
