"""Which files and folders of a package import which others, and where that goes in a circle.

Imports inside of functions count; those under ``TYPE_CHECKING`` don't, for no program runs them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["circles", "folder_circles", "folder_imports", "imports_of"]


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


def _circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    reachable = {name: _reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in found if name in reachable[other])
        for name, found in reachable.items()
        if name in found
    }
    return sorted(groups, key=sorted)


def circles(root: Path) -> list[frozenset[str]]:
    """Modules that import one another, directly or by others: each group once, none of which is within another."""
    return _circles(imports_of(root))


def folder_imports(root: Path) -> dict[str, set[str]]:
    """For each folder of a package, other folders of it that its files import; a folder in a folder is another one.

    The names that an ``__init__`` lists from folders within its own do not count, because a package may export what
    its folders define. The root's own ``__init__`` does not count at all.
    """
    packages = {".".join(path.parent.relative_to(root.parent).parts) for path in root.rglob("__init__.py")}
    graph: dict[str, set[str]] = {package: set() for package in packages}
    for module, imported in imports_of(root).items():
        own = module if module in packages else module.rpartition(".")[0]
        for each in imported:
            other = each if each in packages else each.rpartition(".")[0]
            if not (module in packages and other.startswith(f"{own}.")):
                graph[own].add(other)
    for own, others in graph.items():
        others.discard(own)
        others.discard(root.name)
    graph.pop(root.name)
    return graph


def folder_circles(root: Path) -> list[frozenset[str]]:
    """Folders that import one another, directly or by others, as `folder_imports` counts it."""
    return _circles(folder_imports(root))
