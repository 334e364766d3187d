"""Contracts of an op's derivative: it exists, has the right shapes, and is the right derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.registry import Op
from fp8compile.testing.bits import difference, results
from fp8compile.testing.contracts.contract import BrokenContract, NotLookedAt, looked_at, shown
from fp8compile.testing.contracts.op_samples import some_samples, without_nan

__all__ = ["backward_is_the_derivative", "backward_is_there_or_raises", "differentiable", "gradients_of"]

STEPS = (1e-5, 1e-4, 1e-3, 0.5)  # the last, large step tells a constant function from a staircase
SMOOTH = 1e-3  # relative difference of a smooth function's slopes; small steps have squares of at most 1e-6
MEND = (
    "fix backward. If it intentionally differs (as for a straight-through estimator), pass check_op(op, "
    "gradient=...), a differentiable function of impl's arguments with the intended derivative"
)


def _updated(op: Op) -> list[int]:
    return [place for place, name in enumerate(inspect.signature(op.impl).parameters) if name in op.updates]


def _is_leaf(op: Op, place: int, arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and place not in _updated(op)


def differentiable(op: Op, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Copy floating-point arguments as leaves that require grad, but no argument that the op's backward writes to.

    Returns:
        All arguments with the copies in place, and the list of the copies.
    """
    leaves, given = [], []
    for place, arg in enumerate(args):
        if _is_leaf(op, place, arg):
            arg = arg.detach().clone().requires_grad_()
            leaves.append(arg)
        given.append(arg)
    return tuple(given), leaves


def gradients_of(op: Op, call: Callable[..., Any], args: tuple[Any, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Run an op and its backward; return gradients of ``leaves``, then copies of arguments that the backward changed.

    ``call(*args)`` computes the op, eager or compiled; ``leaves`` are the arguments that require grad.
    """
    given = [arg.clone() if place in _updated(op) and arg is not None else arg for place, arg in enumerate(args)]
    outputs = [out for out in results(call(*given)) if out.requires_grad]
    found = torch.autograd.grad(outputs, leaves, _weights_like(outputs), allow_unused=True)
    gradients = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    return *gradients, *(given[place] for place in _updated(op) if given[place] is not None)


def backward_is_there_or_raises(op: Op, device: torch.device) -> None:
    """Gradients have the arguments' shapes and dtypes; an op without a derivative raises in a backward."""
    for args in looked_at(some_samples(op, device)):
        given, leaves = differentiable(op, args)
        if not leaves or not all(leaf.numel() for leaf in leaves):
            continue
        if op.backward is not None:
            for leaf, gradient in zip(leaves, gradients_of(op, op.overload, given, leaves), strict=False):
                if (gradient.shape, gradient.dtype) != (leaf.shape, leaf.dtype):
                    raise BrokenContract(
                        expected=f"a gradient of shape {tuple(leaf.shape)}, {leaf.dtype}",
                        found=f"shape {tuple(gradient.shape)}, {gradient.dtype}",
                        mend="return from backward a gradient like each argument, or None if it needs none",
                    )
            continue
        outputs = [out for out in results(op.overload(*given)) if out.requires_grad]
        try:
            torch.autograd.grad(outputs[0].sum(), leaves) if outputs else None
        except RuntimeError as error:
            if f"{op.name} has no derivative" in str(error):
                continue
            raise
        if outputs:
            raise BrokenContract(
                expected="a backward pass that reaches an op without a derivative raises an error",
                found="it gave gradients",
                mend="register the op only with fp8compile.library.register_op",
            )


def _half_of_the_digits(actual: Tensor, expected: Tensor) -> str | None:
    """Describe how gradients differ by more than half of their dtype's digits; None if they agree.

    The tolerance is sqrt(eps) times the largest finite element of ``expected``: a wrong derivative exceeds it.
    """
    finite = expected.isfinite()
    if not finite.any():
        return None
    apart = (actual.double() - expected.double()).where(finite, 0.0).abs()
    allowed = torch.finfo(actual.dtype).eps ** 0.5 * expected[finite].double().abs().max()
    return difference(actual, expected) if not (apart <= allowed).all() else None


def _weights_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.arange(out.numel(), device=out.device).view(out.shape).cos().to(out.dtype) for out in outputs]


def _autograd(call: Callable[..., Any], args: tuple[Any, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    outputs = [out for out in results(call(*args)) if out.requires_grad]
    if not outputs:
        return [None] * len(leaves)
    return list(torch.autograd.grad(outputs, leaves, _weights_like(outputs), allow_unused=True))


def _by_autograd(
    op: Op, args: tuple[Any, ...], reference: Callable[..., Any] | None
) -> tuple[str, list[Tensor | None]] | None:
    """Return the gradients of an op's arguments by autograd through ``reference`` or, if None, the op's code.

    The op's code is ``op.impl``, or ``op.decompose`` if autograd can't differentiate ``op.impl``.

    Returns:
        Name of the function that autograd differentiated, and the gradients; None if it can differentiate none.
    """
    calls = {"impl": op.impl, "decompose": op.decompose} if reference is None else {"the reference": reference}
    for what, call in calls.items():
        given, leaves = differentiable(op, args)
        found: list[Tensor | None] = [None]
        try:
            if call is not None:
                found = _autograd(call, given, leaves)
        except RuntimeError:  # raised because quantizing ops have no derivative
            if reference is not None:
                raise
            continue
        if any(each is not None for each in found):
            return what, found
    return None


def _slopes(op: Op, args: tuple[Any, ...], direction: list[Tensor]) -> list[float]:
    """Differentiate a weighted sum of ``op.impl``'s results by central differences, once for each step in ``STEPS``.

    ``direction`` has a tensor for each floating-point argument; the step times this tensor is added to the argument.
    """

    def value(step: float) -> float:
        along = iter(direction)
        moved = [arg + step * next(along) if _is_leaf(op, place, arg) else arg for place, arg in enumerate(args)]
        outputs = [out for out in results(op.impl(*moved)) if out.is_floating_point()]
        return sum(
            float((out.double() * w.double()).sum()) for out, w in zip(outputs, _weights_like(outputs), strict=True)
        )

    return [(value(step) - value(-step)) / (2 * step) for step in STEPS]


def _check_by_differences(op: Op, args: tuple[Any, ...]) -> bool:
    """Raise a BrokenContract if an op's gradients differ from finite differences of ``op.impl``.

    Returns:
        Whether ``op.impl`` takes float64 and is smooth at these arguments; if not, nothing was compared.
    """
    args = tuple(arg.double() if _is_leaf(op, place, arg) else arg for place, arg in enumerate(args))
    given, leaves = differentiable(op, args)
    direction = [torch.randn(leaf.shape, generator=torch.Generator().manual_seed(3)).to(leaf) for leaf in leaves]
    try:
        *small, large = _slopes(op, args, direction)
        found = gradients_of(op, op.overload, given, leaves)
    except Exception:  # an op may refuse float64, which its own samples need not have
        return False
    scale = max(map(abs, small))
    if max(small) - min(small) > SMOOTH * scale or (scale == 0.0 and large != 0.0):
        return False
    claimed = sum(float((gradient.double() * d).sum()) for gradient, d in zip(found, direction, strict=False))
    if abs(claimed - small[0]) > SMOOTH * max(scale, 1e-6):
        raise BrokenContract(
            expected=f"gradients with the directional derivative {small[0]:.6g}, impl's slope from float64 "
            f"differences, for ({shown(args)})",
            found=f"{claimed:.6g}",
            mend=MEND,
        )
    return True


def backward_is_the_derivative(op: Op, device: torch.device, reference: Callable[..., Any] | None = None) -> None:
    """The op's gradients equal autograd's gradients of ``reference``, or else of the op's code.

    Without ``reference``, the code is ``op.impl`` or ``op.decompose``. If autograd can differentiate neither of the
    two, gradients are compared with finite differences.
    """
    if op.backward is None:
        return
    unseen = []
    for args in looked_at(map(without_nan, some_samples(op, device))):
        given, leaves = differentiable(op, args)
        if not leaves or not all(leaf.numel() for leaf in leaves):
            continue
        known = _by_autograd(op, args, reference)
        if known is None:
            if not _check_by_differences(op, args):
                unseen.append(shown(args))
            continue
        what, expected = known
        for index, (got, wanted) in enumerate(
            zip(gradients_of(op, op.overload, given, leaves), expected, strict=False)
        ):
            if wanted is not None and (differs := _half_of_the_digits(got, wanted)) is not None:
                raise BrokenContract(
                    expected=f"the gradients that autograd computes for {what}, for ({shown(args)})",
                    found=f"gradient {index} of backward: {differs}",
                    mend=MEND,
                )
    if unseen:
        raise NotLookedAt(
            f"the values of the derivative, for {len(unseen)} inputs, the first ({unseen[0]}): autograd supports "
            "neither impl nor decompose, and impl is not smooth in float64. Pass check_op(op, gradient=...), a "
            "differentiable function of impl's arguments with the intended derivative"
        )
