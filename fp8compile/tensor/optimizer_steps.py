"""Round quantized parameters once for each optimizer step, although the optimizer writes to them with several ops.

Hooks on all optimizers begin and end a step. In between, a `Pending` holds each parameter's plain values. A compiled
step takes these values as inputs beside the codes, so that its graph is that of plain parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8compile._compat import local_itself, untraced
from fp8compile.tensor.requantize import assign

if TYPE_CHECKING:
    from fp8compile.tensor.quantized_parameter import QuantizedParameter

__all__ = [
    "Pending",
    "check_outside_of_graph_of_step",
    "computed_values",
    "listen_to_optimizers",
    "settle",
    "values_of",
    "write",
]

IN_A_GRAPH = (
    "{what} of a QuantizedParameter in a graph that was compiled while an optimizer's step runs: it has values there, "
    "and stale codes. Only ops in place on the parameter itself go with that: leave this step uncompiled. If a step "
    "has raised, and you caught it: call the optimizer's zero_grad() and step() once, which ends it."
)
Place = tuple[tuple[int, ...], tuple[int, ...], int]


def place_of(tensor: Tensor) -> Place:
    """Shape, strides and storage offset: equal for two views of one memory that have the same elements."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


class Pending:
    """The values of a parameter during an optimizer's step.

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
        """Whether ``tensor``, the parameter or a view of it, has all elements of the parameter.

        Raises:
            TypeError: The view is a part of the parameter in a compiled graph, which can only write the whole.
        """
        same = place_of(tensor) == self.place
        if not same and self.parameter is None:
            raise TypeError(IN_A_GRAPH.format(what="an op on a view"))
        return same

    def given(self) -> Tensor:
        """Return the values that a compiled step reads and writes; dequantize the codes if there are none yet."""
        if self.values is None:
            self.values = self.parameter.dequantize().detach()  # type: ignore[union-attr]  # a graph is given values
        return self.values

    def take(self, values: Tensor) -> None:
        """Replace the values. If there are values already, overwrite their memory, because a graph may hold it."""
        if self.values is None:
            self.values = values
        elif self.values is not values:
            self.values.copy_(values)


def computed_values(tensor: QuantizedParameter) -> Tensor | None:
    """The values that the running step has computed so far; None if the codes are up to date."""
    pending = tensor.pending
    return pending.values if pending is not None and pending.is_of(tensor) else None


def values_of(tensor: QuantizedParameter) -> Tensor:
    """The values that an in-place op reads: what the running step has computed so far, else the dequantized codes."""
    return tensor.dequantize() if (values := computed_values(tensor)) is None else values


def write(tensors: Sequence[QuantizedParameter], values: Sequence[Tensor]) -> None:
    """Write new values to parameters or views of them.

    A whole parameter in a running optimizer step is quantized when the step ends, any other tensor now.
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
    """Quantize what a step has computed so far; one message exchanges the amaxes of all these parameters."""
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


def _parameters(optimizer: Optimizer) -> list[QuantizedParameter]:
    every: Iterable[Any] = (local_itself(p) for group in optimizer.param_groups for p in group["params"])
    return [each for each in every if hasattr(each, "check_writable")]


def _open(parameters: Iterable[QuantizedParameter]) -> None:
    for each in parameters:
        each.pending = Pending(place_of(each), each)


def _close(parameters: Sequence[QuantizedParameter]) -> None:
    settle(parameters)
    for each in parameters:
        each.pending = None


def _outside(argument: Any, parameters: Sequence[QuantizedParameter]) -> Any:
    """Wrap an optimizer's closure, so that its forward and backward run outside of the step, on up-to-date codes.

    Any other argument is returned unchanged.
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
    """Raise a TypeError if a tensor is a parameter in a compiled step's graph, where its codes are out of date."""
    for each in tensors:
        pending = getattr(each, "pending", None)
        if pending is not None and pending.parameter is None:
            raise TypeError(IN_A_GRAPH.format(what=what))


@cache
def listen_to_optimizers() -> None:
    """Register the hooks on all optimizers. The first QuantizedParameter calls this; later calls do nothing."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
