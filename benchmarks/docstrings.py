"""Docstrings of the package, drawn by a seed: a reader marks which of them are read once.

    python -m benchmarks.docstrings --seed 1 --count 30

Functions, classes and modules of fp8compile/ have the same chance each; those without a docstring have none.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["docstrings", "drawn"]

ROOT = Path(__file__).parents[1]
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _shown(path: Path, node: ast.AST, holder: str) -> str:
    """What an editor shows beside a docstring: a module's name, a class and its bases, a function's signature."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{holder}{node.name}({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"class {holder}{node.name}({', '.join(map(ast.unparse, node.bases))})"
    return f"module {path.stem}"


def _nodes(node: ast.AST, holder: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node below one, with the names of the classes around it."""
    yield node, holder
    inside = f"{holder}{node.name}." if isinstance(node, ast.ClassDef) else holder
    for child in ast.iter_child_nodes(node):
        yield from _nodes(child, inside)


def docstrings(root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Path, line, signature and text of every docstring below a folder, in the order of paths and lines."""
    for path in sorted(root.rglob("*.py")):
        for node, holder in _nodes(ast.parse(path.read_text())):
            if isinstance(node, HOLDERS) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "lineno", 1), _shown(path, node, holder), text


def drawn(root: Path, seed: int, count: int) -> list[tuple[Path, int, str, str]]:
    """So many of them, the same for the same seed and sources."""
    found = sorted(docstrings(root))
    return random.Random(seed).sample(found, min(count, len(found)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.docstrings", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="the same seed draws the same docstrings")
    parser.add_argument("--count", type=int, default=30, help="how many are drawn")
    parser.add_argument("--root", type=Path, default=ROOT / "fp8compile", help="the folder whose docstrings count")
    options = parser.parse_args(argv)
    for path, line, name, text in drawn(options.root.resolve(), options.seed, options.count):
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}:{line} {name}\n    {text.replace(chr(10), chr(10) + '    ')}\n")


if __name__ == "__main__":
    main()
