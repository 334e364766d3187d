"""A frame: the body of one function, read statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from fp8compile.nn.parameter_uses.expressions import Expressions
from fp8compile.nn.parameter_uses.values import NOTHING, UNKNOWN

__all__ = ["Frame"]


class Frame(Expressions):
    """Reads a function's body.

    Attributes:
        returned: What it may return.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returned = NOTHING

    def run(self, body: Iterable[ast.stmt]) -> bool:
        """Read statements; whether they end the function, or the round of a loop."""
        return any(self._statement(statement) for statement in body)

    def _statement(self, node: ast.stmt) -> bool:
        read = getattr(self, f"_read_{type(node).__name__}", self._read_parts)
        return bool(read(node))

    def _read_parts(self, node: ast.AST) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.value(part)
            elif isinstance(part, ast.stmt):
                self._statement(part)
            else:
                self._read_parts(part)

    def _read_Return(self, node: ast.Return) -> bool:
        self.returned |= self.value(node.value)
        return True

    def _read_Raise(self, node: ast.Raise) -> bool:
        return True

    _read_Continue = _read_Break = _read_Raise

    def _read_If(self, node: ast.If) -> bool:
        self.value(node.test)
        truth = self._truth(node.test)
        bodies = [node.body, node.orelse] if truth is UNKNOWN else [node.body if truth else node.orelse]
        before, ends, live = self.names, [], []
        for body in bodies:
            self.names = dict(before)
            ended = self.run(body)
            ends.append(self.names)
            live += [] if ended else [self.names]
        names = {name for end in live or ends for name in end}
        self.names = {name: NOTHING.union(*(end.get(name, ()) for end in live or ends)) for name in names}
        return not live

    def _read_With(self, node: ast.With) -> bool:
        for item in node.items:
            self._read_parts(item)
        return self.run(node.body)

    def _read_For(self, node: ast.For) -> None:
        self._bind_round(node.target, node.iter)
        self.run(node.body)
        self.run(node.orelse)

    def _read_Assign(self, node: ast.Assign) -> None:
        found = self.value(node.value)
        for target in node.targets:
            self._bind(target, found, node.value)

    def _read_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, self.value(node.value), node.value)

    def _read_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, self._operated(node.op, node.target, node.value))

    def _read_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = self._local(node)

    def _read_ClassDef(self, node: ast.ClassDef) -> None:
        pass
