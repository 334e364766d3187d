"""Expressions of a function's body: what each may be."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from fp8compile.nn.parameter_uses.source import Code
from fp8compile.nn.parameter_uses.values import (
    DATA,
    NO_NUMBERS,
    NOTHING,
    UNKNOWN,
    Computed,
    Local,
    Object,
    Slot,
    Super,
    Value,
    attribute,
    constant_attribute,
    elements,
    value_of,
)

__all__ = ["Arguments", "Calls", "Expressions"]

Where = tuple[nn.Module, str]  # the method of a module that is running, its module and its name
PLAIN = (type(None), bool, int, float, str)
ITERATING = frozenset({"enumerate", "zip", "reversed", "list", "tuple", "sorted", "iter"})  # functions
ITERATED = frozenset({"items", "named_children", "values", "children"})  # methods
PAIRING = frozenset({"enumerate", "items", "named_children"})  # give pairs of a number or name and an element
PASSING = frozenset({"reversed", "list", "tuple", "sorted", "iter", "values", "children"})
GROWING = frozenset({"append", "extend", "insert", "update", "setdefault"})  # containers, in place
COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """What a function is called with.

    Attributes:
        placed: By position.
        named: By name.
        rest: What any argument may be: entries of ``*args`` and ``**kwargs``.
    """

    placed: Sequence[Value] = ()
    named: Mapping[str, Value] = field(default_factory=dict)
    rest: Value = NOTHING

    def all(self) -> Value:
        """Whatever is among them."""
        return self.rest.union(*self.placed, *self.named.values())


class Calls(Protocol):
    """What a frame asks of its reader."""

    def call(self, callee: Value, arguments: Arguments, where: Where) -> Value:
        """What calling any of these gives."""

    def operate(self, name: str, operands: Value, where: Where) -> Value:
        """What an operator of tensors gives."""

    def method(self, name: str, tensors: Value, arguments: Arguments, where: Where) -> Value:
        """What a method of any of these tensors gives."""


def _iteration(node: ast.expr) -> tuple[str, Sequence[ast.expr]]:
    """The name of what makes an iterable of others, and those: arguments of a function, or the owner of a method."""
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
        return "", ()
    if isinstance(node.func, ast.Name) and node.func.id in ITERATING:
        return node.func.id, node.args[:1] if node.func.id == "enumerate" else node.args
    if isinstance(node.func, ast.Attribute) and node.func.attr in ITERATED and not node.args:
        return node.func.attr, (node.func.value,)
    return "", ()


def _tensors(things: Value) -> Value:
    return Value(thing for thing in things if thing == DATA or isinstance(thing, Slot))


class Expressions:
    """Evaluates the expressions of one function.

    Args:
        calls: The reader.
        code: The function.
        names: What its arguments are.
        where: The method of a module that is running.
        enclosing: The frame of the function that this one is defined in.
    """

    def __init__(
        self, calls: Calls, code: Code, names: dict[str, Value], where: Where, enclosing: Expressions | None = None
    ) -> None:
        self.calls, self.code, self.names, self.where, self.enclosing = calls, code, names, where, enclosing

    def value(self, node: ast.expr | None) -> Value:
        """What an expression may be."""
        if node is None:
            return NOTHING
        read = getattr(self, f"_value_{type(node).__name__}", self._value_of_parts)
        return read(node)

    def _value_of_parts(self, node: ast.AST) -> Value:
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return NOTHING.union(*map(self.value, parts))

    def _value_Name(self, node: ast.Name) -> Value:
        frame: Expressions | None = self
        while frame is not None:
            if node.id in frame.names:
                return frame.names[node.id]
            frame = frame.enclosing
        return value_of(self.code.outer[node.id]) if node.id in self.code.outer else Value([DATA])

    def _local(self, node: ast.FunctionDef | ast.Lambda) -> Value:
        return Value([Local(Code(node, self.code.outer), self)])

    _value_Lambda = _local

    def _bind(self, target: ast.expr, found: Value, source: ast.expr | None = None) -> None:
        """Let a target stand for a value, part by part where both are written as tuples."""
        if isinstance(target, ast.Name):
            self.names[target.id] = found
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = source.elts if isinstance(source, (ast.Tuple, ast.List)) else []
            matching = len(parts) == len(target.elts)
            for index, part in enumerate(target.elts):
                self._bind(part, self.value(parts[index]) if matching else self._elements(found))
        elif isinstance(target, ast.Starred):
            self._bind(target.value, found)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.names[target.value.id] = self.value(target.value) | found

    def _bind_round(self, target: ast.expr, node: ast.expr) -> None:
        """Let a loop's target stand for what each round gives it, of the iterable that the node is.

        ``enumerate``, ``zip`` and ``items`` give tuples: each part of a target takes its own part of them.
        """
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        name, given = _iteration(node)
        if name in PAIRING and len(parts) == 2 and len(given) == 1:
            self._bind(parts[0], NOTHING)
            self._bind_round(parts[1], given[0])
        elif name == "zip" and parts and len(parts) == len(given):
            for part, each in zip(parts, given, strict=True):
                self._bind_round(part, each)
        elif name in PASSING and len(given) == 1:
            self._bind_round(target, given[0])
        else:
            self._bind(target, self._elements(self.value(node)))

    def _value_Attribute(self, node: ast.Attribute) -> Value:
        return self._attribute(self.value(node.value), node.attr)

    def _attribute(self, owners: Value, name: str) -> Value:
        tensors = _tensors(owners)
        found = NOTHING.union(*(attribute(owner, name) for owner in owners - tensors))
        computed = Value(thing for thing in found if isinstance(thing, Computed))
        found -= computed
        if computed:
            found |= self.calls.call(computed, Arguments(), self.where)
        return found if name in NO_NUMBERS else found | tensors

    def _value_Subscript(self, node: ast.Subscript) -> Value:
        self.value(node.slice)
        return self._elements(self.value(node.value), self._constant(node.slice))

    def _elements(self, containers: Value, key: Any = UNKNOWN) -> Value:
        return NOTHING.union(*(elements(thing, key) for thing in containers))

    def _operated(self, op: ast.operator, *operands: ast.expr) -> Value:
        name = "matmul" if isinstance(op, ast.MatMult) else type(op).__name__
        return self.calls.operate(name, NOTHING.union(*map(self.value, operands)), self.where)

    def _value_BinOp(self, node: ast.BinOp) -> Value:
        return self._operated(node.op, node.left, node.right)

    def _value_Compare(self, node: ast.Compare) -> Value:
        compared = NOTHING.union(*map(self.value, [node.left, *node.comparators]))
        return compared & Value([DATA])

    def _value_IfExp(self, node: ast.IfExp) -> Value:
        self.value(node.test)
        truth = self._truth(node.test)
        both = (node.body, node.orelse) if truth is UNKNOWN else (node.body if truth else node.orelse,)
        return NOTHING.union(*map(self.value, both))

    def _value_NamedExpr(self, node: ast.NamedExpr) -> Value:
        self._bind(node.target, found := self.value(node.value))
        return found

    def _value_ListComp(self, node: ast.ListComp | ast.DictComp) -> Value:
        for generator in node.generators:
            self._bind_round(generator.target, generator.iter)
        return self.value(node.elt) if not isinstance(node, ast.DictComp) else self.value(node.value)

    _value_SetComp = _value_GeneratorExp = _value_DictComp = _value_ListComp

    # ------------------------------------------------------------------ calls

    def _arguments(self, node: ast.Call) -> Arguments:
        unpacked = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
        unpacked += [keyword.value for keyword in node.keywords if keyword.arg is None]
        placed = [] if any(isinstance(arg, ast.Starred) for arg in node.args) else [self.value(a) for a in node.args]
        loose = [] if placed else [self.value(arg) for arg in node.args if not isinstance(arg, ast.Starred)]
        return Arguments(
            placed,
            {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None},
            NOTHING.union(*loose, *(self._elements(self.value(each)) for each in unpacked)),
        )

    def _value_Call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return self._super(node.args)
        arguments = self._arguments(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(arguments.placed) > 1:
            name = self._constant(node.args[1])
            if isinstance(name, str):
                return self._attribute(arguments.placed[0], name).union(*arguments.placed[2:])
        if not isinstance(node.func, ast.Attribute):
            return self.calls.call(self.value(node.func), arguments, self.where)
        owners, name = self.value(node.func.value), node.func.attr
        if name in GROWING and isinstance(node.func.value, ast.Name):
            self.names[node.func.value.id] = owners | arguments.all()
            return NOTHING
        tensors = _tensors(owners)
        found = self.calls.method(name, tensors, arguments, self.where) if tensors else NOTHING
        if owners - tensors:
            found |= self.calls.call(self._attribute(owners - tensors, name), arguments, self.where)
        return found

    def _super(self, given: Sequence[ast.expr]) -> Value:
        """Attributes of the first argument, which is the module, from the classes behind the function's own."""
        first = self.code.node.args.args[0].arg if self.code.node.args.args else ""
        cls = self._constant(given[0]) if given else self.code.outer.get("__class__")
        owners = [thing for thing in self.names.get(first, ()) if isinstance(thing, Object)]
        return Value(Super(cls, owner) for owner in owners if cls in type(owner.value).__mro__)

    # ------------------------------------------------------------------ constants

    def _constant(self, node: ast.expr) -> Any:
        """The object that an expression is, or `UNKNOWN`; of numbers and the like, as they are now."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            owner = self._constant(node.value)
            return UNKNOWN if owner is UNKNOWN else constant_attribute(owner, node.attr)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            return -value if isinstance(value, (int, float)) else UNKNOWN
        if not isinstance(node, ast.Name):
            return UNKNOWN
        if node.id in self.names:
            things = list(self.names[node.id])
            return things[0].value if len(things) == 1 and isinstance(things[0], Object) else UNKNOWN
        return UNKNOWN if self.enclosing is not None else self.code.outer.get(node.id, UNKNOWN)

    def _truth(self, node: ast.expr) -> Any:
        """Whether a condition holds, or `UNKNOWN`."""
        if isinstance(node, ast.BoolOp):
            decides = isinstance(node.op, ast.Or)
            truths = [self._truth(part) for part in node.values]
            if decides in truths:
                return decides
            return UNKNOWN if UNKNOWN in truths else not decides
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self._truth(node.operand)
            return UNKNOWN if truth is UNKNOWN else not truth
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node.ops[0], self._constant(node.left), self._constant(node.comparators[0]))
        value = self._constant(node)
        is_module = isinstance(value, nn.Module) and not hasattr(type(value), "__len__")
        return bool(value) if is_module or isinstance(value, PLAIN) else UNKNOWN

    def _compared(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        is_plain = isinstance(left, PLAIN) and isinstance(right, PLAIN)
        if left is UNKNOWN or right is UNKNOWN or not (is_plain or isinstance(op, (ast.Is, ast.IsNot))):
            return UNKNOWN
        try:
            return COMPARED[type(op)](left, right)
        except (KeyError, TypeError):  # `in`, or an order of things that have none
            return UNKNOWN
