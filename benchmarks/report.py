"""Runs the benchmarks, writes their tables to a report, and plots them.

    python -m benchmarks.report [NAMES ...] [--json] [--out FOLDER]

Each script runs in its own process: some compile, some start process groups, and one measures an import.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "main", "write_report"]

ROOT = Path(__file__).parents[1]

# in the order of the report; benchmarks that need no GPU come first
NAMES = (
    "kernels", "bytes_limit", "memory", "comm", "roofline", "import_time", "overhead", "compile_time",
    "gemm", "linear", "block", "train",
)  # fmt: skip
# for each table with a picture: the columns that name a bar, and the column with its length
PLOTTED: dict[str, tuple[tuple[str, ...], str]] = {
    "kernels": (("block",), "sum GB"),
    "bytes_limit": (("recipe",), "ratio"),
    "memory": (("block",), "saved MB"),
    "comm": (("ranks", "recipe"), "MB"),
    "overhead": (("recipe",), "over hand us"),
    "compile_time": (("contender", "compiled"), "CPU to bf16 whole"),
    "gemm": (("size", "what"), "speed to bf16"),
    "linear": (("size", "contender"), "speed to bf16"),
    "block": (("shape", "block", "contender"), "speed to bf16"),
    "train": (("contender",), "speed to bf16"),
}
Result = dict[str, Any]


def _measured(name: str) -> Result:
    """Run benchmark ``name`` in a new process; return the benchmark's table or its error."""
    began = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", "--json"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    found: Result = {"name": name, "seconds": round(time.perf_counter() - began, 1)}
    if finished.returncode or not lines:
        last = finished.stderr.strip().splitlines()[-1:] or ["it printed no table"]
        return {**found, "error": last[0]}
    return {**found, **json.loads(lines[-1])}


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _section(result: Result, picture: str | None) -> list[str]:
    if "error" in result:
        return [f"## {result['name']}", "", f"Failed: `{result['error']}`", ""]
    columns, rows = list(result["rows"][0]), result["rows"]
    bar = "|".join("---" for _ in columns)
    lines = [f"## {result['name']}", "", f"{result['title']} ({result['seconds']} s)", ""]
    lines += [f"|{'|'.join(columns)}|", f"|{bar}|"]
    lines += [f"|{'|'.join(_cell(row[column]) for column in columns)}|" for row in rows]
    return [*lines, "", *([f"![{result['name']}]({picture})", ""] if picture else [])]


def _draw(result: Result, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, value = PLOTTED[result["name"]]
    labels = [" ".join(str(row[name]) for name in names) for row in result["rows"]]
    figure = Figure(figsize=(8, 1 + 0.25 * len(labels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh(labels[::-1], [row[value] for row in result["rows"]][::-1])
    axes.set(xlabel=value, title=result["title"])
    figure.savefig(path)


def write_report(results: list[Result], out: Path) -> None:
    """Write ``report.md`` and ``results.json`` to folder ``out``; add plots if matplotlib is installed."""
    out.mkdir(parents=True, exist_ok=True)
    can_draw = find_spec("matplotlib") is not None
    first = next((result for result in results if "torch" in result), {})
    lines = [
        "# Benchmarks of fp8compile",
        "",
        f"PyTorch {first.get('torch', '?')} on {first.get('machine', '?')}.",
        "",
    ]
    if not can_draw:
        lines += ["No pictures: matplotlib is not installed (`pip install matplotlib`).", ""]
    for result in results:
        picture = f"{result['name']}.png" if can_draw and "rows" in result and result["name"] in PLOTTED else None
        if picture:
            _draw(result, out / picture)
        lines += _section(result, picture)
    (out / "report.md").write_text("\n".join(lines))
    (out / "results.json").write_text(json.dumps(results, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks and write the report; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Run benchmarks, and write a report with tables and pictures.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the report")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    results = []
    for name in args.names or NAMES:
        results.append(_measured(name))
        if not args.json:
            print("\n".join(_section(results[-1], None)), flush=True)
    if args.json:
        print(json.dumps(results))
    write_report(results, args.out)
    print(f"report: {args.out / 'report.md'}", file=sys.stderr)
    failed = [result["name"] for result in results if "error" in result]
    if failed:
        print(f"{', '.join(failed)} failed; the report says why", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
