"""compare: runs a model and a reference side by side, and finds the module that makes the difference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.testing.numerics.comparison import Comparison, ComparisonRow
from fp8compile.testing.numerics.decibels import sqnr
from fp8compile.testing.numerics.model_calls import Loss, arguments_of, check_eager, loss_of, run_aside
from fp8compile.testing.numerics.module_calls import (
    ModuleCall,
    cloned,
    first_tensor,
    recorded_calls,
    take_gradients,
    units,
    with_history,
)

__all__ = ["compare"]


def _ratio(actual: Tensor | None, expected: Tensor | None) -> float | None:
    if actual is None or expected is None:
        return None
    return math.nan if actual.shape != expected.shape else sqnr(actual, expected)


def _run(model: nn.Module, batch: Any, loss: Loss | None, seed: int) -> tuple[list[ModuleCall], float]:
    args, kwargs = arguments_of(batch)
    with run_aside(model, batch, seed), recorded_calls(units(model)) as calls:
        found = loss_of("compare", model(*args, **kwargs), loss)
        take_gradients(calls, found)
    return calls, found.item()


def _alone(call: ModuleCall, given: ModuleCall, seed: int) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Run a module alone on the input and grad_output of the reference's call, ``given``.

    Returns the output, grad_input and the gradients of the parameters. ``seed`` seeds random numbers.
    """
    leaves = cloned((given.args, given.kwargs))
    parameters = [each for each in call.module.parameters() if each.requires_grad]
    with run_aside(call.module, (), seed):
        args, kwargs = with_history(leaves)
        y, x = first_tensor(call.module(*args, **kwargs)), first_tensor(leaves)
        wanted = [*([x] if x is not None and x.requires_grad else []), *parameters]
        if y is None or given.grad_output is None or not y.requires_grad or not wanted:
            return y, None, []
        grads: list[Tensor | None] = list(torch.autograd.grad(y, wanted, given.grad_output, allow_unused=True))
    grad_x = grads.pop(0) if len(grads) > len(parameters) else None
    return y, grad_x, grads


def _pairs(mine: list[ModuleCall], other: list[ModuleCall]) -> tuple[list[tuple[ModuleCall, ModuleCall]], list[str]]:
    by_name = {call.name: call for call in other}
    pairs = [(call, by_name[call.name]) for call in mine if call.name in by_name]
    missing = {call.name for call in mine} ^ set(by_name)
    return pairs, sorted(missing)


def _kind(a: nn.Module, b: nn.Module) -> str:
    one, two = type(a).__name__, type(b).__name__
    return one if type(a) is type(b) else f"{one}, {two}"


def compare(
    model: nn.Module, reference: nn.Module, batch: Any, *, loss: Loss | None = None, seed: int = 0
) -> Comparison:
    """Run a model and a reference on a batch, and compare the inputs and outputs of each module.

    Each module without children, and each layer that `convert` supports, is also run alone on the reference's input
    and grad_output. The table therefore shows, for forward and backward, the accumulated difference and what each
    module adds.

    The two models run in eager mode, from the same random state, and are restored afterwards. The activations of both
    models are kept in memory.

    Args:
        model: The model to examine, such as a converted one.
        reference: The model to compare with, such as a copy that was not converted. Modules are paired by their names.
        batch: Arguments of both models, as for `advise`.
        loss: Function of the output that returns the scalar to differentiate, as in `advise`.
        seed: Seed of the random numbers, for dropout.

    Returns:
        The comparison, which prints as a table.

    Raises:
        TypeError: A model is not a module, is compiled, or does not return a scalar loss.
        ValueError: The two models have no module in common.
    """
    for each in (model, reference):
        check_eager("compare", each)
    mine, own_loss = _run(model, batch, loss, seed)
    other, other_loss = _run(reference, batch, loss, seed)
    pairs, missing = _pairs(mine, other)
    if not pairs:
        raise ValueError(
            "compare: the two models have no module name in common. Compare a model with a copy that differs only in "
            "its layers, such as compare(fp8compile.convert(copy.deepcopy(model)), model, batch)."
        )
    forward, backward = [], []
    for call, given in pairs:
        kind = _kind(call.module, given.module)
        y, grad_x, grads = _alone(call, given, seed)
        want_y, want_x, want_grads = _alone(given, given, seed)
        inputs = [first_tensor((each.args, each.kwargs)) for each in (call, given)]
        forward.append(
            ComparisonRow(
                name=call.name, kind=kind, direction="forward", arriving=_ratio(*inputs),
                leaving=_ratio(call.output, given.output), own=_ratio(y, want_y),
            )
        )  # fmt: skip
        if given.grad_output is None and call.grad_output is None:
            continue
        ratios = [_ratio(*each) for each in zip(grads, want_grads, strict=False)]
        known = [each for each in ratios if each is not None]
        actual = _alone(call, call, seed)[1]
        backward.append(
            ComparisonRow(
                name=call.name, kind=kind, direction="backward", arriving=_ratio(call.grad_output, given.grad_output),
                leaving=_ratio(actual, want_x), own=_ratio(grad_x, want_x), own_weight=min(known, default=None),
            )
        )  # fmt: skip
    return Comparison(rows=(*forward, *reversed(backward)), losses=(own_loss, other_loss), missing=tuple(missing))
