"""Where the syntax tree of a function is, and what the names mean that it doesn't define."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any

__all__ = ["Code", "code_of"]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LAMBDA = "<lambda>"


@dataclass(frozen=True, eq=False)
class Code:
    """A function that can be read.

    Attributes:
        node: Its definition.
        outer: What names mean that it does not define.
    """

    node: Definition
    outer: Mapping[str, Any]

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements."""
        return [ast.Return(self.node.body)] if isinstance(self.node, ast.Lambda) else self.node.body


def _name(node: Definition) -> str:
    return LAMBDA if isinstance(node, ast.Lambda) else node.name


@cache
def _definition(code: CodeType) -> Definition | None:
    """The syntax tree of a code object; None where there is no source, or its lines have several such functions."""
    try:
        lines, first = inspect.findsource(code)
        text = "".join(inspect.getblock(lines[first:]))
        tree = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text)  # a block as indented as it is there
    except (OSError, SyntaxError, IndexError):
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, Definition) and _name(node) == code.co_name]
    return found[0] if found and (len(found) == 1 or code.co_name != LAMBDA) else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to it yet
        return None


def code_of(function: FunctionType) -> Code | None:
    """The syntax tree of a function, of the innermost one where decorators wrap it; None if there is no source."""
    function = inspect.unwrap(function)
    node = _definition(function.__code__) if isinstance(function, FunctionType) else None
    if node is None:
        return None
    closed = zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    return Code(node, ChainMap(dict(closed), function.__globals__, vars(builtins)))
