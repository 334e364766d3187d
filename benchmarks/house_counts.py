"""How much there is to hold in one's head: lines, ops, classes, cycles, private names.

python -m benchmarks.house --counts [--tree PATH]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.house_source import lines_of_code
from benchmarks.import_graph import circles, folder_circles, imports_of

__all__ = ["BUDGET", "ROOMS", "counts", "over_budget"]

# folders and files of fp8compile/ that the core does without
ROOMS = ("testing", "cli", "integrations", "export", "saved_tensors", "optim", "monitor")
# The most lines that the core may have, above which `make lint` fails. Raising one is a commit of its own, with its
# reason.
BUDGET = {"core: lines": 32_000, "core: lines of code": 19_590}
PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*")
MAY_NAME_PRIVATE = ("_compat", "inductor")


def _room(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return parts[0] if parts[0] in ROOMS else "core"


def _private_names(root: Path) -> int:
    found = 0
    for path in root.rglob("*.py"):
        if _room(path, root) == "core" and path.relative_to(root).parts[0] not in MAY_NAME_PRIVATE:
            found += len(PRIVATE.findall(path.read_text()))
    return found


def _classes(paths: list[Path]) -> int:
    return sum(isinstance(node, ast.ClassDef) for path in paths for node in ast.walk(ast.parse(path.read_text())))


def _ops(tree: Path) -> int:
    code = "import fp8compile, fp8compile.library\nfrom fp8compile.ops.registry import OPS\nprint(len(OPS))"
    found = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    return int(found.stdout)


def _lines_by_room(root: Path) -> dict[str, int | str]:
    by_room: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        by_room.setdefault(_room(path, root), []).append(path)
    found: dict[str, int | str] = {}
    for room, paths in sorted(by_room.items()):
        found[f"{room}: lines"] = sum(len(path.read_text().splitlines()) for path in paths)
        found[f"{room}: lines of code"] = sum(map(lines_of_code, paths))
    found["core: classes"] = _classes(by_room["core"])
    return found


def over_budget(tree: Path) -> list[str]:
    """Return a sentence for each count of a checkout that is above `BUDGET`."""
    found = _lines_by_room(tree / "fp8compile")
    return [
        f"{name}: {found[name]}, and the budget is {most}. Remove lines, or raise BUDGET in "
        "benchmarks/house_counts.py in a commit of its own that says why."
        for name, most in BUDGET.items()
        if int(found[name]) > most
    ]


def counts(tree: Path) -> dict[str, int | str]:
    """Counts of a checkout, by what they are called."""
    root = tree / "fp8compile"
    found = _lines_by_room(root)
    found["ops registered"] = _ops(tree)
    found |= {f"files in {name}/": len(list((root / name).glob("*.py"))) for name in ("nn", "ops")}
    found["circles of files"] = len(circles(root))
    cycles = folder_circles(root)
    found["folder cycles"] = len(cycles)
    found["folders in cycles"] = "; ".join(" ".join(sorted(each)) for each in cycles)
    graph = imports_of(root)
    found["quantizers import inductor"] = sum(
        each.startswith("fp8compile.inductor")
        for module, imported in graph.items()
        for each in imported
        if module.startswith("fp8compile.quantizers")
    )
    found["private names of torch outside _compat and inductor"] = _private_names(root)
    tests = [path for name in ("tests", "compile_tests") for path in (tree / name).rglob("*.py")]
    found["tests: lines"] = sum(len(path.read_text().splitlines()) for path in tests)
    docs = [*(tree / "docs").rglob("*.md"), *tree.glob("*.md")]
    found["docs: words"] = sum(len(path.read_text().split()) for path in docs if "_site" not in path.parts)
    return found
