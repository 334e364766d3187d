"""Records in outcomes/ what works with a converted model, eager and compiled, on the PyTorch version of this Python.

python tests/behaviour/table.py             run all
python tests/behaviour/table.py FILE...     run the tests of these files, replace their outcomes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from ways import OUTCOMES, RECORD, Cells, recorded

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


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


def main(arguments: list[str]) -> None:
    """Run the tests and write their outcomes."""
    version = ".".join(torch.__version__.split(".")[:2])
    cells: Cells = recorded(version) if arguments else {}
    run_tests(arguments or [str(HERE)], cells)
    OUTCOMES.mkdir(exist_ok=True)
    (OUTCOMES / f"{version}.json").write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
