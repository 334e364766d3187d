"""fp8compile::straight_through: return the values of one tensor, and pass the gradient to another.

Rounding has a derivative of zero almost everywhere. To train through rounding, the result equals the rounded
``values``, and its gradient goes to ``x``.

Source: Bengio et al. 2013, arXiv:1308.3432 (the straight-through estimator).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import along_every_dim
from fp8compile.quantizers import Quantizer

__all__ = ["straight_through"]


def _kernel(values: Tensor, x: Tensor, quantizer: Quantizer) -> Tensor:
    return values.clone()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[1].dtype


straight_through: OpOverload = register_op(
    "fp8compile::straight_through",
    _kernel,
    fake=lambda values, x, quantizer: torch.empty_like(values),
    backward=lambda ctx, grad: (None, grad.to(ctx.dtype), None),
    decompose=_kernel,
    sharding=lambda values, x, quantizer: along_every_dim(x.ndim, inputs=2, outputs=1, others=1),
    setup_context=_setup_context,
)
