"""What the source of a checkout says of how it is built: files and lines, circles, classes, hooks, families."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.import_graph import circles

__all__ = ["CORE_WITHOUT", "lines_of_code", "packages", "source_row"]

CORE_WITHOUT = ("testing", "cli", "integrations")
LAYER_FOLDERS = ("fp8compile/ops/layer", "fp8compile/layer")
HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
REGISTERS = "register_"  # what a file calls that registers an op


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def packages(tree: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of each package, and of each file beside packages; and of the trainer, where it lies outside."""
    root = tree / "fp8compile"
    found = {}
    for entry in sorted(root.iterdir()):
        files = sorted(entry.rglob("*.py")) if entry.is_dir() else [entry] * (entry.suffix == ".py")
        if files:
            found[entry.stem if entry.is_file() else entry.name] = len(files), sum(map(_lines, files))
    trainer = sorted((tree / "examples" / "train").rglob("*.py"))
    return found | ({"examples/train": (len(trainer), sum(map(_lines, trainer)))} if trainer else {})


def _trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _named(tree: ast.AST, kind: type) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def tensor_classes(root: Path) -> list[str]:
    """Names of the classes that derive from ``torch.Tensor``, directly or by one another."""
    classes = [node for _, tree in _trees(root) for node in _named(tree, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    found = {"Tensor", "torch.Tensor"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return sorted(found & bases.keys())


def hook_bodies(root: Path) -> int:
    """How many functions are FSDP2's hooks, of that of the two hooks that has more."""
    names = [node.name for _, tree in _trees(root) for node in _named(tree, ast.FunctionDef)]
    return max(map(names.count, HOOKS))


def _registers_a_layer(tree: ast.Module) -> bool:
    """Whether a file registers an op called linear, or none by a name of its own: what all layers share does not."""
    registered = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(REGISTERS)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    return not registered or any(name.endswith("linear") for name in registered)


def families(tree: Path) -> list[str]:
    """The functions that keep what a layer's backward needs, as file and name."""
    return [
        f"{path.relative_to(tree)}:{node.name}"
        for folder in LAYER_FOLDERS
        for path, parsed in _trees(tree / folder)
        if _registers_a_layer(parsed)
        for node in _named(parsed, ast.FunctionDef)
        if node.name in ("_setup_context", "setup_context")
    ]


def lines_of_code(path: Path) -> int:
    """Lines of a file without docstrings, comments and blank lines."""
    text: set[int] = set()
    parsed = ast.parse(path.read_text())
    for node in ast.walk(parsed):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            text |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(number not in text and bool(line.strip()) and line.strip()[0] != "#" for number, line in lines)


def _core_files(root: Path) -> Iterator[Path]:
    yield from (path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in CORE_WITHOUT)


def source_row(tree: Path) -> dict[str, int]:
    """Counts by what they are called in the table."""
    root = tree / "fp8compile"
    by_package = packages(tree)
    inside = {name: counts for name, counts in by_package.items() if "/" not in name}
    found = circles(root)
    return {
        "files of the package": sum(files for files, _ in inside.values()),
        "lines of the package": sum(lines for _, lines in inside.values()),
        "core lines": sum(lines for name, (_, lines) in inside.items() if name not in CORE_WITHOUT),
        "core lines of code alone": sum(map(lines_of_code, _core_files(root))),
        "circles of imports": len(found),
        "files in a circle": sum(map(len, found)),
        "classes of quantized tensors": len(tensor_classes(root)),
        "families with setup_context": len(families(tree)),
        "bodies of FSDP2's hooks": hook_bodies(root),
    }
