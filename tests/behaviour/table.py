"""Writes docs/results/behaviour.md: what works with a converted model, eager and compiled, on each PyTorch version.

    python tests/behaviour/table.py             run all with this Python's PyTorch, replace its column
    python tests/behaviour/table.py FILE...     run the tests of these files, replace their cells
    python tests/behaviour/table.py --render    only write the document again

Columns of other versions stay as their last run left them, in outcomes/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ways import OUTCOMES, RECORD, VERSIONS, WAYS, Cells, recorded

__all__ = ["DOCUMENT", "rendered"]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCUMENT = ROOT / "docs" / "results" / "behaviour.md"
HEADER = """# What works with a converted model

Each row is a test in `tests/behaviour/`, which runs it in eager mode and under `torch.compile(fullgraph=True)`; this
file is what `python tests/behaviour/table.py` made of the outcomes. A test fails as soon as its cell changes. Numbers
stand for the texts below each table: an error that says what to do, or what that version of PyTorch lacks. An empty
cell: the row makes no sense there.

A row that names no recipe runs `rowwise`. Of "Autograd" the rows with functions of `torch.func`, and of "Parallel"
that with pipeline stages, run every ready recipe but `delayed`, whose layers write their state in the backward: see
[Delayed scaling](../delayed-scaling.md).
"""


def run_tests(paths: list[str], cells: Cells) -> None:
    """Run behaviour tests by this Python, put their outcomes into ``cells``; end the program if one fails."""
    with tempfile.NamedTemporaryFile("r") as file:
        environment = os.environ | {RECORD: file.name, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-q", *paths]
        if code := subprocess.run(command, cwd=ROOT, env=environment).returncode:
            sys.exit(code)
        lines = [json.loads(line) for line in file.read().splitlines()]
    for group, row, way, outcome in sorted(lines):
        cells.setdefault(group, {}).setdefault(row, {})[way] = outcome


def _groups(columns: dict[str, Cells]) -> dict[str, list[str]]:
    """Rows of each group, over all versions."""
    groups: dict[str, list[str]] = {}
    for cells in columns.values():
        for group, rows in cells.items():
            known = groups.setdefault(group, [])
            known += [row for row in rows if row not in known]
    return {group: sorted(rows) for group, rows in sorted(groups.items())}


def _cell(outcome: str | None, notes: list[str]) -> str:
    if outcome in (None, "works"):
        return outcome or ""
    if outcome not in notes:
        notes.append(outcome)
    return f"raises ({notes.index(outcome) + 1})"


def _plain(note: str) -> str:
    """A text of PyTorch's that Markdown would take for a link."""
    return note.replace("](", "] (")


def rendered() -> str:
    """The document, from the recorded outcomes."""
    columns = {version: recorded(version) for version in VERSIONS}
    parts = [HEADER]
    for group, rows in _groups(columns).items():
        notes: list[str] = []
        heads = [f"{way} {version}" for way in WAYS for version in VERSIONS]
        lines = [f"## {group}", "", f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for row in rows:
            cells = [
                _cell(columns[version].get(group, {}).get(row, {}).get(way), notes)
                for way in WAYS
                for version in VERSIONS
            ]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines += ["", *(f"{number}. {_plain(note)}" for number, note in enumerate(notes, 1))]
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> None:
    """Run and render."""
    if arguments != ["--render"]:
        import torch

        version = ".".join(torch.__version__.split(".")[:2])
        cells: Cells = recorded(version) if arguments else {}
        run_tests(arguments or [str(HERE)], cells)
        OUTCOMES.mkdir(exist_ok=True)
        (OUTCOMES / f"{version}.json").write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
        recorded.cache_clear()
    DOCUMENT.write_text(rendered())


if __name__ == "__main__":
    main(sys.argv[1:])
