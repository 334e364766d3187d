"""How far a template's results may be from the exact ones: products in tiles, attention block by block.

A template adds in an order of its own, so its bits have no reference. Its results are compared with exact ones, in
float64, within a bound:

    a product of K terms    K roundings in float32 of the sum of the terms' magnitudes: the worst case of any order
    FlexAttention           the error of its formula in eager mode, in the operands' dtype, as FlashAttention's tests do

Twice that is allowed. Operators that are fused with the template are computed three times, with the exact value, the
lowest and the highest: so their results show what the bound becomes. The rounding of the stored dtype is added.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.products import PRODUCTS
from fp8compile.testing.gpu.program.result import Difference

__all__ = ["Bounded", "bounded_attention", "bounded_product", "in_float64", "is_attention", "outside"]

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
FLOAT32_ROUNDING = 2.0**-24
FUSED_ROUNDINGS = 16  # of float32, in what is fused with a template
ATTENTION = ("flex_attention", "flex_attention_backward")
BIASED = ("addmm", "baddbmm", "bias_addmm")


@dataclass(frozen=True)
class Bounded:
    """The values of an operator in a template; each is a tensor, or a tuple if the operator has several results.

    Attributes:
        exact: The exact value in float64.
        low: The same, as far below as the template may be.
        high: The same, as far above.
    """

    exact: Any
    low: Any
    high: Any

    def at(self, place: Sequence[int]) -> Bounded:
        """One of several results."""
        found = self
        for index in place:
            found = Bounded(*(each[index] for each in (found.exact, found.low, found.high)))
        return found


def is_attention(target: Any) -> bool:
    """Whether a node's target is FlexAttention or its backward."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in ATTENTION


def _magnitude(arg: Any) -> Any:
    if not isinstance(arg, Tensor) or not arg.is_floating_point() or arg.dtype == torch.float8_e8m0fnu:
        return arg
    return arg.abs() if arg.dtype.itemsize > 1 else (arg.view(torch.uint8) & 0x7F).view(arg.dtype)


def bounded_product(name: str, gpu: Gpu, args: Sequence[Any], kwargs: dict[str, Any]) -> Bounded:
    """Multiply two matrices exactly, with the bound of a sum in float32.

    Args:
        name: The product, a key of ``PRODUCTS``.
        gpu: The GPU, whose requirements are checked.
        args: Its arguments.
        kwargs: Its other arguments.
    """
    scaled = name.startswith("_scaled")  # rounded once to the dtype that the kind of scaling has
    if not scaled:
        args = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        kwargs = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    exact, magnitude = (PRODUCTS[name](gpu, *each, **kwargs) for each in (args, list(map(_magnitude, args))))
    terms = args[1 if name in BIASED else 0].shape[-1]
    rounding = torch.finfo(exact.dtype).eps if scaled else 0
    bound = (terms * FLOAT32_ROUNDING + rounding) * magnitude.double()
    return _around(exact.double(), bound)


def _around(exact: Any, bound: Any) -> Bounded:
    """The values that are twice the bound away; some of several results may be None."""
    if isinstance(exact, tuple):
        sides = [_around(*each) for each in zip(exact, bound, strict=True)]
        return Bounded(*(tuple(getattr(each, name) for each in sides) for name in ("exact", "low", "high")))
    return Bounded(exact, exact - 2 * bound, exact + 2 * bound) if exact is not None else Bounded(None, None, None)


def in_float64(arg: Any) -> Any:
    """The argument, with its floating-point tensors in float64."""
    if isinstance(arg, tuple):
        return tuple(map(in_float64, arg))
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


def bounded_attention(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Bounded:
    """Compute FlexAttention, or its backward, in float64 and in the dtype of its operands."""
    exact = _attention(target, in_float64(_recast(args, keep=False)), kwargs)
    usual = _attention(target, _recast(args, keep=True), kwargs)
    return _around(exact, _error(usual, exact))


def _recast(args: Any, *, keep: bool) -> Any:
    """Arguments whose graphs cast floats by an operator that can be batched, or not at all."""
    if isinstance(args, tuple | list):
        return tuple(_recast(each, keep=keep) for each in args)
    if not isinstance(args, fx.GraphModule):
        return args
    changed = copy.deepcopy(args)
    for node in changed.graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        value, dtype = node.args
        if keep or not dtype.is_floating_point:
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
        else:
            node.replace_all_uses_with(value)
    changed.recompile()
    return changed


def _attention(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    *others, captured, masked = args
    with torch.enable_grad():  # the eager backward differentiates
        captured = tuple(
            each.detach().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
            for each in captured
        )
        return _detached(target(*others, captured, masked, **kwargs))


def _detached(values: Any) -> Any:
    if isinstance(values, tuple | list):
        return tuple(map(_detached, values))
    return values.detach().double() if isinstance(values, Tensor) else values


def _error(usual: Any, exact: Any) -> Any:
    """The largest error of each result."""
    if isinstance(exact, tuple):
        return tuple(_error(*each) for each in zip(usual, exact, strict=True))
    if exact is None or not exact.numel():
        return 0
    return (usual - exact).abs().nan_to_num(0, 0, 0).max()


def outside(where: str, got: Tensor, wanted: Bounded) -> Iterator[Difference]:
    """The difference of a template's result that is further from the exact one than its bound, if it is.

    Args:
        where: Words for the place.
        got: The program's result.
        wanted: The exact result, and the furthest ones.
    """
    exact, low, high = (each.reshape(got.shape) for each in (wanted.exact, wanted.low, wanted.high))
    if got.is_floating_point():
        beyond, allowed = _beyond(got, exact, torch.maximum((low - exact).abs(), (high - exact).abs()))
    else:
        beyond, allowed = (got != exact) & (got != low) & (got != high), 0.0
    if beyond.any():
        element = tuple(beyond.nonzero()[0].tolist())
        yield Difference(
            where=f"{where}, off by more than {allowed:.3g}", element=element, expected=exact[element].item(),
            got=got[element].item(), count=int(beyond.sum()), total=got.numel(),
        )  # fmt: skip


def _beyond(got: Tensor, exact: Tensor, spread: Tensor) -> tuple[Tensor, float]:
    """Which numbers are too far from the exact ones, and the bound without the rounding of each number."""
    kind, values = torch.finfo(got.dtype), got.double()
    bound = float(spread.nan_to_num(0, 0, 0).max()) + kind.smallest_normal if got.numel() else 0.0
    allowed = bound + (kind.eps + FUSED_ROUNDINGS * FLOAT32_ROUNDING) * exact.abs()
    same = (values == exact) | (values.isnan() & exact.isnan())
    is_special = ~exact.isfinite() | ~values.isfinite()
    return torch.where(is_special, ~same, (values - exact).abs() > allowed), bound
