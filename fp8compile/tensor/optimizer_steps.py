"""Quantize parameters once, at the end of an optimizer's step, although several ops write to them.

Hooks on all optimizers begin and end a step. In between, a `Pending` holds each parameter's values. A compiled step
takes these values as inputs, so that its graph is that of plain parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8compile._compat import local_itself, untraced
from fp8compile.tensor.parameter_attributes import REPLACED
from fp8compile.tensor.requantize import assign

if TYPE_CHECKING:
    from fp8compile.tensor.quantized_parameter import QuantizedParameter

__all__ = [
    "Pending",
    "check_outside_of_graph_of_step",
    "computed_values",
    "listen_to_optimizers",
    "mark_replaced",
    "settle",
    "values_of",
    "write",
]

IN_A_GRAPH = (
    "{what} of a QuantizedParameter is not supported in a graph that was compiled during an optimizer's step, "
    "where the parameter holds values and its FP8 data is stale. Only in-place ops on the parameter itself are "
    "supported. Do not compile this step. If a step raised an error that you caught, call the optimizer's "
    "zero_grad() and step() once to end it."
)
OLDER = (
    "{name}.step: {function} replaced a parameter of shape {shape} after this optimizer was created. The step would "
    "update a tensor that the model no longer has, and the model would not train. Create the optimizer afterwards."
)
Place = tuple[tuple[int, ...], tuple[int, ...], int]


def place_of(tensor: Tensor) -> Place:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


class Pending:
    """Plain values of a quantized parameter while an optimizer's step runs.

    Attributes:
        place: Shape, strides and offset of the parameter that the optimizer writes to.
        parameter: The parameter; None in a compiled graph, which is given the values only.
        values: The parameter's values in its dtype; None while its codes are up to date.
    """

    def __init__(
        self, place: Place, parameter: QuantizedParameter | None = None, values: Tensor | None = None
    ) -> None:
        self.place = place
        self.parameter = parameter
        self.values = values

    def is_of(self, tensor: QuantizedParameter) -> bool:
        """Whether ``tensor``, the parameter itself or a view of it, has all elements of the parameter.

        Raises:
            TypeError: In a compiled graph, ``tensor`` is a view of only a part of the parameter.
        """
        same = place_of(tensor) == self.place
        if not same and self.parameter is None:
            raise TypeError(IN_A_GRAPH.format(what="an op on a view"))
        return same

    def given(self) -> Tensor:
        """Return the values that a compiled step reads and writes; if there are none yet, dequantize the codes."""
        if self.values is None:
            self.values = self.parameter.dequantize().detach()  # type: ignore[union-attr]  # a graph is given values
        return self.values

    def take(self, values: Tensor) -> None:
        """Set the values; earlier values are overwritten in place, because a graph may refer to their memory."""
        if self.values is None:
            self.values = values
        elif self.values is not values:
            self.values.copy_(values)


def computed_values(tensor: QuantizedParameter) -> Tensor | None:
    """Return the values that the running optimizer step has computed so far; None if there are none."""
    pending = tensor.pending
    return pending.values if pending is not None and pending.is_of(tensor) else None


def values_of(tensor: QuantizedParameter) -> Tensor:
    """Return a parameter's values in the running optimizer step, else the dequantized codes."""
    return tensor.dequantize() if (values := computed_values(tensor)) is None else values


def write(tensors: Sequence[QuantizedParameter], values: Sequence[Tensor]) -> None:
    """Write new values to parameters or to views of parameters.

    In an optimizer step, a whole parameter is quantized when the step ends. All other writes are quantized at once.
    """
    now = []
    for tensor, value in zip(tensors, values, strict=True):
        pending = tensor.pending
        if pending is not None and pending.is_of(tensor):
            pending.take(value)
        else:
            now.append((tensor, value))
    if now:
        _write_now(now)


def settle(parameters: Iterable[QuantizedParameter]) -> None:
    """Quantize the values that a step has computed so far, with one amax message for each group of ranks."""
    found = (each.pending for each in parameters)
    every = {id(pending): pending for pending in found if pending is not None and pending.parameter is not None}
    due: list[Any] = [(pending.parameter, pending.values) for pending in every.values() if pending.values is not None]
    for pending in every.values():
        pending.values = None  # before the writing below, which reads codes and would settle again
    if due:
        _write_now(due)


@torch.no_grad()
def _write_now(writes: Sequence[tuple[QuantizedParameter, Tensor]]) -> None:
    assign([tensor for tensor, _ in writes], [values for _, values in writes])
    for tensor, values in writes:
        tensor.written = True
        tensor.keep(values)


def mark_replaced(parameter: Tensor, function: str) -> None:
    """Make steps of optimizers that still have ``parameter`` raise, because ``function`` took it out of the model."""
    setattr(parameter, REPLACED, function)
    listen_to_optimizers()


def _check_not_replaced(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if (function := vars(p).get(REPLACED)) is not None:
                name, shape = type(optimizer).__name__, tuple(p.shape)
                raise RuntimeError(OLDER.format(name=name, function=function, shape=shape))


def _parameters(optimizer: Optimizer) -> list[QuantizedParameter]:
    every: Iterable[Any] = (local_itself(p) for group in optimizer.param_groups for p in group["params"])
    return [each for each in every if hasattr(each, "check_writable")]


def _open(parameters: Iterable[QuantizedParameter]) -> None:
    for each in parameters:
        each._shared.is_copy = False
        each.pending = Pending(place_of(each), each)


def _close(parameters: Sequence[QuantizedParameter]) -> None:
    settle(parameters)
    for each in parameters:
        each.pending = None


def _outside(argument: Any, parameters: Sequence[QuantizedParameter]) -> Any:
    """Wrap an optimizer's closure, which reads parameters: values become codes before it runs.

    An ``argument`` that is not callable is returned unchanged; ``parameters`` are the optimizer's.
    """
    if not callable(argument):
        return argument

    @wraps(argument)
    def call(*args: Any, **kwargs: Any) -> Any:
        _close(parameters)
        found = argument(*args, **kwargs)
        _open(parameters)
        return found

    return call


@untraced
def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _check_not_replaced(optimizer)
    if not (parameters := _parameters(optimizer)):
        return None
    _close(parameters)  # an earlier step may have raised and left values
    _open(parameters)
    outside = partial(_outside, parameters=parameters)
    return (args[0], *map(outside, args[1:])), {name: outside(value) for name, value in kwargs.items()}


@untraced
def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _close(_parameters(optimizer))


def check_outside_of_graph_of_step(tensors: Iterable[object], what: object) -> None:
    """Raise a TypeError if one of ``tensors`` is a parameter in a compiled optimizer step's graph.

    In this graph its codes are out of date. ``what`` names the op that reads the codes, for the error's text.
    """
    for each in tensors:
        pending = getattr(each, "pending", None)
        if pending is not None and pending.parameter is None:
            raise TypeError(IN_A_GRAPH.format(what=what))


@cache
def listen_to_optimizers() -> None:
    """Register hooks on the steps of all optimizers, once; the first QuantizedParameter calls this.

    Parameters that fp8compile has replaced by others call it too.
    """
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
