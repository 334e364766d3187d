"""Results as a table for people or as JSON for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import machine

__all__ = ["Row", "emit", "lines", "replace_section"]

Row = dict[str, object]


def _text(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def lines(rows: Sequence[Row], *, digits: int = 3) -> list[str]:
    """Rows with the same keys as aligned lines: names to the left, numbers to the right."""
    cells = [tuple(rows[0]), *(tuple(_text(value, digits) for value in row.values()) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    numeric = [isinstance(value, (int, float)) for value in rows[0].values()]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]


def emit(title: str, rows: Sequence[Row], *, as_json: bool, digits: int = 3) -> None:
    """Print a benchmark's rows; those of a rehearsal are marked."""
    is_rehearsal = machine().is_rehearsal
    if is_rehearsal:
        title = f"REHEARSAL, its numbers mean nothing: {title}"
    if as_json:
        where = {"torch": torch.__version__, "machine": platform.machine(), "rehearsal": is_rehearsal}
        print(json.dumps({"title": title, **where, "rows": list(rows)}))
    else:
        print(f"{title} (PyTorch {torch.__version__})", *lines(rows, digits=digits), sep="\n")


def replace_section(page: Path, heading: str, body: Sequence[str]) -> None:
    """Write a section of a page, ``## heading``, in place of the one that it has; a new one comes last."""
    before, _, rest = page.read_text().partition(f"## {heading}\n")
    after = rest[rest.index("\n## ") + 1 :] if "\n## " in rest else ""
    section = "\n".join([f"## {heading}", "", *body, ""])
    page.write_text("\n".join(filter(None, [before.rstrip() + "\n", section, after])))
