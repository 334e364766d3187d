"""The reader: runs the source of forwards on what expressions may be, instead of on numbers.

Each module's forward is read, and what it calls, with the module's own attributes as they are: so it is known which
parameter ``self.layers[0].weight`` is, and which branch ``if self.bias is None`` takes. What a forward is called with
is data. A product of data and a parameter is what is looked for; one of parameters alone computes another weight.

    F.linear(x, self.qkv.weight)                  multiplied past the forward of qkv
    x.to(self.qkv.weight.dtype)                   no number of the weight
    if self.fused: kernel(x, self.qkv.weight)     nothing where fused is False; else kernel takes it

Nothing of a model runs. What isn't seen: functions without source, attributes that ``__getattr__`` computes,
``model.parameters()`` and the like. What may change between two calls is taken for what it is now.
"""

from __future__ import annotations

import contextlib
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from fp8compile.nn.parameter_uses.expressions import Arguments, Where
from fp8compile.nn.parameter_uses.frame import Frame
from fp8compile.nn.parameter_uses.source import Code, code_of
from fp8compile.nn.parameter_uses.uses import Kind, Use, Uses
from fp8compile.nn.parameter_uses.values import (
    DATA,
    NO_NUMBERS,
    NOTHING,
    Computed,
    Local,
    Method,
    Object,
    Slot,
    Value,
    value_of,
)

__all__ = ["parameter_uses"]

PACKAGE = __name__.partition(".")[0]
DEEPEST = 20  # calls in calls, each some 25 frames of Python's; what a deeper one gives counts as data
PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "inner",
    "bilinear", "multi_head_attention_forward", "_scaled_mm", "scaled_mm", "_grouped_mm", "grouped_mm",
    "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
})  # fmt: skip
ADDING = frozenset({"addmm", "addmv", "addbmm", "baddbmm"})  # to their first operand
CONVOLUTIONS = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
})  # fmt: skip
# change a tensor's dtype or shape into that of another one
LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
NOT_READ = frozenset({"torch", *sys.stdlib_module_names})  # whose functions are known by name, or read no weight
CONTAINERS = frozenset({"items", "values", "keys", "get", "pop", "copy", "index", "count"})


def _package(function: Any) -> str:
    """Where a function is from; torch keeps operators of all packages, and only its own are its own."""
    module = getattr(function, "__module__", None) or ""
    if module.startswith("torch._ops.") and module not in ("torch._ops.aten", "torch._ops.prims"):
        return ""
    return module.partition(".")[0]


def _bound(code: Code, arguments: Arguments) -> dict[str, Value]:
    """What a function's parameters are in a call."""
    given = code.node.args
    positional = [parameter.arg for parameter in (*given.posonlyargs, *given.args)]
    names = {parameter.arg: arguments.rest for parameter in given.kwonlyargs}
    names |= dict.fromkeys(positional, arguments.rest) | dict(zip(positional, arguments.placed, strict=False))
    names |= {name: value for name, value in arguments.named.items() if name in names}
    if given.vararg is not None:
        names[given.vararg.arg] = arguments.rest.union(*arguments.placed[len(positional) :])
    if given.kwarg is not None:
        more = (value for name, value in arguments.named.items() if name not in names)
        names[given.kwarg.arg] = arguments.rest.union(*more)
    return names


class Reader:
    """Reads forwards, and what they call, each with the same arguments once."""

    def __init__(self) -> None:
        self.uses = Uses()
        self.results: dict[Any, Value] = {}
        self.depth = 0

    def read(self, module: nn.Module) -> None:
        """Read the forward of a module, called with data.

        Source is anybody's, and so are the attributes on the way: what can't be followed is left unread, as code
        without source is. `conversion_report(model, forward=...)` tells what a forward really did.
        """
        self.depth = 0
        with contextlib.suppress(Exception):
            self._call_module(module, Arguments(rest=Value([DATA])), (module, ""))

    # ------------------------------------------------------------------ what frames ask for

    def operate(self, name: str, operands: Value, where: Where, added: Value = NOTHING) -> Value:
        """What a function, a method or an operator of tensors gives; with data, the parameters are used."""
        if DATA not in operands:
            return operands | added
        self._use(added, Kind.OTHER, where)
        kind = Kind.PRODUCT if name in PRODUCTS else Kind.CONVOLUTION if name in CONVOLUTIONS else Kind.OTHER
        self._use(operands, kind, where)
        return Value([DATA])

    def method(self, name: str, tensors: Value, arguments: Arguments, where: Where) -> Value:
        """What a method of tensors gives, or of a container that holds them."""
        if name in NO_NUMBERS:
            return NOTHING
        if name in LIKE or name in CONTAINERS:
            return tensors
        arguments = Arguments([tensors, *arguments.placed], arguments.named, arguments.rest)
        if hasattr(torch.Tensor, name):
            return self._operated(name, arguments, where)
        return self._hand(arguments, where)

    def call(self, callee: Value, arguments: Arguments, where: Where) -> Value:
        """What calling any of these gives."""
        if not callee:
            return self._hand(arguments, where)
        return NOTHING.union(*(self._call(thing, arguments, where) for thing in callee))

    # ------------------------------------------------------------------ what is called

    def _call(self, thing: Any, arguments: Arguments, where: Where) -> Value:
        if isinstance(thing, Local):
            return self._run(thing.code, arguments, where, thing.frame)
        if isinstance(thing, (Method, Computed)):
            return self._call_method(thing.function, thing.owner, arguments, where)
        if isinstance(thing, Object) and isinstance(thing.value, nn.Module):
            return self._call_module(thing.value, arguments, where)
        if isinstance(thing, Object):
            return self._call_function(thing.value, arguments, where)
        return self._hand(arguments, where) | Value([DATA])

    def _call_module(self, module: nn.Module, arguments: Arguments, where: Where) -> Value:
        if "forward" in vars(module):
            return self.call(value_of(vars(module)["forward"]), arguments, where)
        return self._call_method(type(module).forward, Object(module), arguments, where)

    def _call_method(self, function: Any, owner: Object, arguments: Arguments, where: Where) -> Value:
        module = owner.value
        arguments = Arguments([Value([owner]), *arguments.placed], arguments.named, arguments.rest)
        if isinstance(module, nn.Module):
            if function is nn.Linear.forward or function in vars(nn.Module).values():
                return Value([DATA])  # a layer's own product; what belongs to all modules reads no weight by name
            code = code_of(function)
            where = module, f"{type(module).__name__}.{getattr(function, '__name__', function)}"
            return self._hand(arguments, where) if code is None else self._run(code, arguments, where)
        is_function = isinstance(module, type) and issubclass(module, torch.autograd.Function)
        if is_function and getattr(function, "__name__", "") == "apply":
            has_context = module.setup_context is torch.autograd.Function.setup_context
            inputs = arguments.placed[1:]
            placed = [NOTHING, *inputs] if has_context else inputs
            return self.call(value_of(module.forward), Arguments(placed, arguments.named, arguments.rest), where)
        return self._call_function(function, arguments, where)

    def _call_function(self, function: Any, arguments: Arguments, where: Where) -> Value:
        package, name = _package(function), getattr(function, "__name__", "").partition(".")[0]
        if name in NO_NUMBERS and package in ("torch", "builtins"):
            return NOTHING
        if package == PACKAGE:
            return Value([DATA])  # a product in FP8, or nothing of a parameter
        if package == "torch":
            return self._operated(name, arguments, where)
        if package in NOT_READ:
            return arguments.all() | self._call_back(arguments, where)
        if arguments.all() <= Value([DATA]):
            return arguments.all()  # no way to a parameter
        code = code_of(function) if isinstance(function, FunctionType) else None
        return self._hand(arguments, where) if code is None else self._run(code, arguments, where)

    def _operated(self, name: str, arguments: Arguments, where: Where) -> Value:
        """What one of torch's functions gives, or a method of tensors."""
        added = arguments.placed[0] if name in ADDING and arguments.placed else NOTHING
        factors = Arguments(arguments.placed[1:], arguments.named, arguments.rest) if added else arguments
        operands = Value(thing for thing in factors.all() if not _is_callable(thing))
        return self.operate(name, operands | self._call_back(arguments, where), where, added)

    def _call_back(self, arguments: Arguments, where: Where) -> Value:
        """What functions give that are arguments themselves, called with any of the others."""
        given = arguments.all()
        functions = Value(thing for thing in given if _is_callable(thing))
        if not functions:
            return NOTHING
        return self.call(functions, Arguments(rest=(given - functions) | Value([DATA])), where)

    def _hand(self, arguments: Arguments, where: Where) -> Value:
        """What something gives that can't be read."""
        given = arguments.all() | self._call_back(arguments, where)
        if DATA in given:
            self._use(given, Kind.HANDED, where)
            return Value([DATA])
        return given

    def _run(self, code: Code, arguments: Arguments, where: Where, enclosing: Frame | None = None) -> Value:
        names = _bound(code, arguments)
        key = id(code.node), enclosing, frozenset(names.items())
        if key not in self.results and self.depth < DEEPEST:
            self.results[key] = Value([DATA])  # for who calls itself
            self.depth += 1
            frame = Frame(self, code, names, where, enclosing)
            frame.run(code.body)
            self.depth -= 1
            self.results[key] = frame.returned
        return self.results.get(key, Value([DATA]))

    def _use(self, operands: Value, kind: Kind, where: Where) -> None:
        for thing in operands:
            if isinstance(thing, Slot):
                self.uses.add(thing.module, thing.name, Use(kind, *where))


def _is_callable(thing: Any) -> bool:
    functions = (FunctionType, BuiltinFunctionType)
    return isinstance(thing, (Local, Method)) or (isinstance(thing, Object) and isinstance(thing.value, functions))


def parameter_uses(model: nn.Module) -> Uses:
    """What the forwards of a model's modules do with its parameters, by their source.

    Args:
        model: Any module. Nothing of it runs, and nothing is changed.

    Returns:
        The uses that were seen, of parameters with two dims or more.
    """
    reader = Reader()
    for module in reversed(list(model.modules())):  # inner ones first: they are named, not who calls them
        reader.read(module)
    return reader.uses
