"""Which names of fp8compile a source takes, and which of them are no public ones."""

from __future__ import annotations

import ast

import fp8compile as f8
from fp8compile import export, library, ops, optim, parallel, recipes, tables, testing

__all__ = ["imported", "private"]

PUBLIC = {module.__name__: module for module in (f8, export, library, ops, optim, parallel, recipes, tables, testing)}
INTEGRATIONS = "fp8compile.integrations"  # its modules are public, and need the libraries that they are for


def _attribute(node: ast.Attribute) -> str | None:
    """An attribute of ``f8``, or of one of its public modules, as ``module:name``."""
    if isinstance(node.value, ast.Name) and node.value.id == "f8":
        return f"fp8compile:{node.attr}"
    if isinstance(node.value, ast.Attribute) and (above := _attribute(node.value)):
        module = above.replace(":", ".")
        return f"{module}:{node.attr}" if module in PUBLIC else None
    return None


def imported(source: str) -> set[str]:
    """Names that a source takes of fp8compile, as ``module:name``, and attributes of ``f8`` as ``fp8compile:name``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {f"{alias.name}:" for alias in node.names if alias.name.split(".")[0] == "fp8compile"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fp8compile":
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (name := _attribute(node)):
            found.add(name)
    return found


def private(names: set[str]) -> set[str]:
    """Those that are no public name of a public module."""

    def is_public(whole: str) -> bool:
        module, _, name = whole.partition(":")
        if module == INTEGRATIONS:
            return True
        if module not in PUBLIC:
            return False
        return not name or name in PUBLIC[module].__all__ or f"{module}.{name}" in PUBLIC

    return {whole for whole in names if not is_public(whole)}
