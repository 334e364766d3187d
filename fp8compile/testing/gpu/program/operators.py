"""Computes PyTorch's operators for the reference, with the same bits as interpreted kernels.

Sums are rounded once, because PyTorch's CPU kernels add in their own order. Functions such as exp run on contiguous
tensors, because PyTorch has several implementations whose last bits differ. Division by a number is multiplication by
its reciprocal, as in a GPU's kernels, both PyTorch's and Inductor's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.testing.gpu.program.arithmetic import elementwise, fma, square_root

__all__ = ["computed"]

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
SUMS = (aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar, prims.div.default)
FUNCTIONS = ("exp", "rsqrt", "tanh", "erf", "log", "sin", "cos", "exp2", "log2")


def computed(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator: by a rule in this file if there is one, else by PyTorch."""
    if op is aten.view.default:  # saved tensors have the strides that Inductor gave them
        op = aten.reshape.default
    if op in SUMS:
        return _sum(op, args, kwargs)
    if op is prims.fma.default and args[0].dtype == torch.float32:  # PyTorch's CPU kernel rounds twice
        return torch.from_numpy(fma(*(arg.numpy() for arg in args)))
    if op is aten.var_mean.correction:
        return _var_mean(*args, **kwargs)
    if op in DIVISIONS and isinstance(args[1], float | int) and args[1] and args[0].is_floating_point():
        return args[0] * (1.0 / args[1])
    if op is aten.neg.default and args[0].is_floating_point():  # Triton's formula: a zero has no sign
        return 0 - args[0]
    if op._schema.name.partition("::")[2] in FUNCTIONS:
        return elementwise(op, args[0])
    if op is aten.sqrt.default and args[0].dtype == torch.float32:
        return square_root(args[0].contiguous())
    if op is aten.sigmoid.default and args[0].dtype == torch.float32:  # Triton's formula
        return 1 / (1 + elementwise(torch.exp, -args[0]))
    return op(*args, **kwargs)


def _sum(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute the sum or mean operator ``target`` as kernels do here: in float64, rounded once to float32.

    For a mean, the rounded sum is then divided.
    """
    x, dims = args[0], args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not x.is_floating_point():
        return target(*args, **kwargs)
    dims = dims or tuple(range(x.ndim))
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.double().sum(dims, keep).to(exact)
    if target in (aten.mean.dim, aten.mean.default):
        total = total / torch.tensor(float(torch.Size([x.shape[dim] for dim in dims]).numel()), dtype=exact)
    return total.to(kwargs.get("dtype") or x.dtype)


def _var_mean(x: Tensor, dims: list[int] | None = None, *, correction: float = 1, keepdim: bool = False) -> Any:
    """Compute ``aten.var_mean`` over ``dims`` by two sums, as Inductor does if a row fits a block."""
    dims = dims or list(range(x.ndim))
    count = float(torch.Size([x.shape[dim] for dim in dims]).numel())
    mean = _sum(aten.mean.dim, (x, dims, True), {})
    squares = _sum(aten.sum.dim_IntList, ((x - mean).square(), dims, keepdim), {})
    return squares / torch.tensor(max(0.0, count - correction), dtype=x.dtype), mean if keepdim else mean.squeeze(dims)
