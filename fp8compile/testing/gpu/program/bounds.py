"""Error bounds for the results of Inductor's templates: GEMMs in tiles, attention block by block.

A template adds in its own order, so no reference has the same bits. Its results are compared with exact results,
computed in float64. The two may differ by twice this bound:

    a GEMM with K terms     K roundings in float32 of the sum of the terms' magnitudes, the worst case of any order,
                            and one rounding of the result
    FlexAttention           the largest error of its formula in eager mode, in the operands' dtype, as in the tests of
                            FlashAttention

Operators that are fused after the template are computed four times: in float64 from the exact, the lowest and the
highest allowed result, which shows how the bound changes; and in float32 from the exact result, which shows the
operators' own roundings. In addition, one rounding to the stored dtype is allowed.
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

__all__ = ["SIDES", "Bounded", "bounded_attention", "bounded_product", "in_float64", "is_attention", "outside"]

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
FLOAT32_ROUNDING = 2.0**-24
SIDES = ("exact", "low", "high", "single")
ATTENTION = ("flex_attention", "flex_attention_backward")
BIASED = ("addmm", "baddbmm", "bias_addmm")
PLAIN = ("mm", "bmm", *BIASED)


@dataclass(frozen=True)
class Bounded:
    """Values of an operator in a Triton template's kernel; tuples if the operator has several results.

    Attributes:
        exact: Computed in float64 from the template's exact result.
        low: Computed in float64 from the lowest result that the template may have.
        high: Computed in float64 from the highest result that the template may have.
        single: Computed in float32 from the template's exact result.
    """

    exact: Any
    low: Any
    high: Any
    single: Any

    def at(self, place: Sequence[int]) -> Bounded:
        """Select one of the operator's results by the nested index ``place``."""
        found = self
        for index in place:
            found = Bounded(*(getattr(found, side)[index] for side in SIDES))
        return found


def is_attention(target: Any) -> bool:
    """Whether ``target``, the operator of a graph's node, is FlexAttention or its backward."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in ATTENTION


def _magnitude(arg: Any) -> Any:
    if not isinstance(arg, Tensor) or not arg.is_floating_point() or arg.dtype == torch.float8_e8m0fnu:
        return arg
    return arg.abs() if arg.dtype.itemsize > 1 else (arg.view(torch.uint8) & 0x7F).view(arg.dtype)


def bounded_product(name: str, gpu: Gpu, args: Sequence[Any], kwargs: dict[str, Any]) -> Bounded:
    """Multiply two matrices in float64, with bounds for a result that is summed in float32.

    Args:
        name: The GEMM, a key of ``PRODUCTS``.
        gpu: The GPU, whose requirements are checked.
        args: The GEMM's arguments.
        kwargs: The GEMM's keyword arguments.
    """
    kind = kwargs.get("out_dtype") or next(arg.dtype for arg in args if isinstance(arg, Tensor))
    if name in PLAIN:  # others demand dtypes, and round to them
        args = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        kwargs = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    exact, magnitude = (PRODUCTS[name](gpu, *each, **kwargs) for each in (args, list(map(_magnitude, args))))
    terms = args[1 if name in BIASED else 0].shape[-1]
    rounding = torch.finfo(kind).eps / 2 * exact.double().abs()  # before what is fused behind it
    bound = terms * FLOAT32_ROUNDING * magnitude.double() + rounding
    return _around(exact.double(), bound)


def _around(exact: Any, bound: Any) -> Bounded:
    if isinstance(exact, tuple):
        sides = [_around(*each) for each in zip(exact, bound, strict=True)]
        return Bounded(*(tuple(getattr(each, side) for each in sides) for side in SIDES))
    return Bounded(exact, exact - 2 * bound, exact + 2 * bound, exact) if exact is not None else Bounded(*[None] * 4)


def in_float64(arg: Any) -> Any:
    """Convert ``arg``, or each entry of a tuple, to float64 if it is a floating-point tensor."""
    if isinstance(arg, tuple):
        return tuple(map(in_float64, arg))
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


def bounded_attention(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Bounded:
    """Compute FlexAttention or its backward, ``target``, in float64, with bounds for its result.

    The bound is the largest error of the same formula in the operands' dtype.
    """
    exact = _attention(target, in_float64(_recast(args, keep=False)), kwargs)
    usual = _attention(target, _recast(args, keep=True), kwargs)
    return _around(exact, _error(usual, exact))


def _recast(args: Any, *, keep: bool) -> Any:
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
    if isinstance(exact, tuple):
        return tuple(_error(*each) for each in zip(usual, exact, strict=True))
    if exact is None or not exact.numel():
        return 0
    return (usual - exact).abs().nan_to_num(0, 0, 0).max()


def outside(where: str, got: Tensor, wanted: Bounded) -> Iterator[Difference]:
    """Yield a difference if a template's result is further from the exact one than its bound allows.

    Args:
        where: Description of the result.
        got: The template's result.
        wanted: The exact result, and the lowest and highest allowed results.
    """
    sides = (getattr(wanted, side).reshape(got.shape) for side in SIDES)
    exact, low, high, single = (each.double() if each.is_floating_point() else each for each in sides)
    if got.is_floating_point():
        spread = torch.maximum((low - exact).abs(), (high - exact).abs()).nan_to_num(0, 0, 0)
        fused = (single - exact).abs().nan_to_num(0, 0, 0)
        beyond, allowed = _beyond(got, exact, spread + 2 * fused.max() if got.numel() else spread)
    else:
        beyond, allowed = (got != exact) & (got != low) & (got != high), torch.zeros(got.shape)
    if beyond.any():
        element = tuple(beyond.nonzero()[0].tolist())
        yield Difference(
            where=f"{where}, off by more than {float(allowed[element]):.3g}", element=element,
            expected=exact[element].item(), got=got[element].item(), count=int(beyond.sum()), total=got.numel(),
        )  # fmt: skip


def _beyond(got: Tensor, exact: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of elements that are too far from ``exact``, and each element's allowed distance.

    ``spread`` is the allowed distance before the result is rounded to its dtype.
    """
    kind, values = torch.finfo(got.dtype), got.double()
    allowed = spread + (kind.eps + FLOAT32_ROUNDING) * exact.abs() + kind.smallest_normal
    same = (values == exact) | (values.isnan() & exact.isnan())
    is_special = ~exact.isfinite() | ~values.isfinite()
    return torch.where(is_special, ~same, (values - exact).abs() > allowed), allowed
