"""Linears and attention that multiply bfloat16 numbers in float32, for CPUs without instructions for bfloat16.

PyTorch multiplies bfloat16 on such a CPU (AVX2 alone: most AMD desktops before Zen 4, Intel's before Alder Lake) by a
loop that is some forty times slower than its float32 product, so that the contenders in bfloat16 would take the time
of `make train`. A float32 product of bfloat16 numbers, rounded once, is what an instruction for them computes: their
products are exact in float32, and both add these up in float32. Attention rounds its result alone, where PyTorch's in
bfloat16 rounds the shares too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fp8compile import _compat
from fp8compile.cli.train.model import Attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["widen_products"]


class _Product(torch.autograd.Function):
    """y_MN = x_MK @ w_NK^T in float32, rounded to bfloat16, and the two products of its backward alike.

    A function, because AOTAutograd traces the backward of plain ops under the forward's autocast, in bfloat16 again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rounded(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _rounded(grad, weight), _rounded(grad.t(), x)


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float()).bfloat16()


class _WideLinear(nn.Linear):
    """A linear under autocast to bfloat16, whose three products are of float32 numbers and rounded to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), bfloat16."""
        x = input.bfloat16().flatten(0, -2)
        return _Product.apply(x, self.weight.bfloat16()).unflatten(0, input.shape[:-1])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        wide = (each.float() for each in (query, key, value))
        return F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).bfloat16()


def widen_products(model: nn.Module, device: torch.device) -> None:
    """Have what of a model is not converted multiply in float32, where the device multiplies no bfloat16 by itself.

    Args:
        model: Linears without bias; those that are converted stay what they are.
        device: Where it runs.
    """
    if device.type != "cpu" or _compat.cpu_multiplies_bfloat16():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            assert module.bias is None, "the model has no bias, whose rounding would differ"
            module.__class__ = _WideLinear
        elif isinstance(module, Attention):
            module.attend = _attend
