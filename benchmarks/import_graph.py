"""Which files of a package import which others, and where that goes in a circle.

Imports inside of functions count; those under ``TYPE_CHECKING`` don't, for no program runs them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["circles", "imports_of"]


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that a program may run."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from _statements(child)
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _statements(child)


def _imported(path: Path, package: str) -> Iterator[tuple[str, str | None]]:
    """Modules that a file names, each with a name that it takes from it, which may be a module too."""
    for node in _statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
            continue
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield from ((base, alias.name) for alias in node.names)


def imports_of(root: Path) -> dict[str, set[str]]:
    """For each module under a folder that is a package, the modules of that package that its file imports.

    Args:
        root: The package's folder.
    """
    files = {_module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    found = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named = (f"{base}.{name}" if f"{base}.{name}" in files else base for base, name in _imported(path, package))
        found[module] = {each for each in named if each in files and each != module}
    return found


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = list(graph[start])
    while pending:
        if (module := pending.pop()) not in found:
            found.add(module)
            pending += graph[module]
    return found


def circles(root: Path) -> list[frozenset[str]]:
    """Modules that import one another, directly or by others: each group once, none of which is within another."""
    graph = imports_of(root)
    reachable = {module: _reachable(graph, module) for module in graph}
    groups = {
        frozenset(other for other in found if module in reachable[other])
        for module, found in reachable.items()
        if module in found
    }
    return sorted(groups, key=sorted)
