"""How a checkout is built, in numbers: files, circles, classes, copies, and what a call passes through.

    python -m benchmarks.house                           this checkout beside the one before the rebuild
    python -m benchmarks.house --tree PATH --json        the numbers of another checkout, as JSON
    python -m benchmarks.house --write                   the table of docs/results/house.md
    python -m benchmarks.house --counts                  lines, ops, classes and cycles alone, without a measurement
    python -m benchmarks.house --budget                  fails if the core has more lines than its budget

What each number means is in docs/results/house.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.house_counts import counts, over_budget
from benchmarks.house_source import packages, source_row
from benchmarks.table import Row, lines

__all__ = ["measured"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BEFORE, PAGE = RESULTS / "house-before.json", RESULTS / "house.md"
BEGIN = "```text\n"
# what the rebuild is to reach, as its issue says: at most so much
GOALS = {
    "circles of imports": 0,
    "files in a circle": 0,
    "classes of quantized tensors": 4,
    "families with setup_context": 1,
    "bodies of FSDP2's hooks": 1,
    "twins that share nothing": 0,
    "plain: files": 22,
    "plain: calls": 189,
    "grouped: files": 33,
    "grouped: calls": 376,
    "tensor_parallel: files": 32,
    "tensor_parallel: calls": 494,
    "graph_fsdp: files": 38,
    "graph_fsdp: calls": 323,
    "tensorwise: us over hand": 45,
    "rowwise: us over hand": 45,
    "blockwise: us over hand": 45,
}


def _run(tree: Path, *command: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"house: {' '.join(command)} in {tree} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def measured(tree: Path, rounds: int) -> dict[str, dict]:
    """All numbers of a checkout: ``"packages"`` has files and lines by package, ``"house"`` the others.

    Args:
        tree: Its folder.
        rounds: Of the measurement of times.
    """
    calls = _run(tree, str(Path(__file__).with_name("house_calls.py")), str(rounds))
    house = source_row(tree)
    house["op twins"] = len(calls["twins"])
    house["twins that share nothing"] = sum(not shared for shared in calls["twins"].values())
    for way, passed in calls["calls"].items():
        house |= {f"{way}: {what}": count for what, count in passed.items()}
    for recipe, us in calls["times"].items():
        house[f"{recipe}: us of f8.linear"] = round(us["f8.linear"])
        house[f"{recipe}: us over hand"] = round(us["f8.linear"] - us["by hand"])
    return {"packages": packages(tree), "house": house}


def _table(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    house: list[Row] = [
        {"number": name, "before": before["house"].get(name, "-"), "now": value, "goal": str(GOALS.get(name, ""))}
        for name, value in after["house"].items()
    ]
    parts = sorted(before["packages"].keys() | after["packages"].keys())
    by_package: list[Row] = []
    for name in parts:
        row: Row = {"package": name}
        for when, found in (("before", before), ("now", after)):
            files, count = found["packages"].get(name, (0, 0))
            row |= {f"files {when}": files, f"lines {when}": count}
        by_package.append(row)
    return [*lines(house), "", *lines(by_package)]


def main() -> None:
    parser = argparse.ArgumentParser(description="How a checkout is built, in numbers.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--rounds", type=int, default=400, help="of the measurement of times")
    parser.add_argument("--json", action="store_true", help="the checkout's numbers alone")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results/house.md")
    parser.add_argument("--counts", action="store_true", help="lines, ops, classes and cycles alone")
    parser.add_argument("--budget", action="store_true", help="fail if the core has more lines than its budget")
    args = parser.parse_args()
    if args.budget:
        sys.exit("\n".join(over_budget(args.tree.resolve())) or 0)
    if args.counts:
        for name, value in counts(args.tree.resolve()).items():
            print(f"{name:<52} {value}")
        return
    found = measured(args.tree.resolve(), args.rounds)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    table = "\n".join(_table(json.loads(BEFORE.read_text()), found))
    print(table)
    if args.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(head + BEGIN + table + "\n" + rest[rest.index("```") :])


if __name__ == "__main__":
    main()
