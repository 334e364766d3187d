"""Linears and attention that multiply bfloat16 numbers in float32, for CPUs without instructions for bfloat16.

On such a CPU (with AVX2 only) PyTorch multiplies bfloat16 by a loop that is some forty times slower than its float32
product. A float32 product of bfloat16 numbers, rounded once, is also what bfloat16 instructions compute: the product
of two such numbers is exact in float32, and sums are in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train.model import Attention


class _Product(torch.autograd.Function):
    """y_MN = x_MK @ w_NK^T. Gradients are written out because AOTAutograd would trace those of ops under autocast."""

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
    def forward(self, input: Tensor) -> Tensor:
        x = input.bfloat16().flatten(0, -2)
        return _Product.apply(x, self.weight.bfloat16()).unflatten(0, input.shape[:-1])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        wide = (each.float() for each in (query, key, value))
        return F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).bfloat16()


def _cpu_multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widen_products(model: nn.Module, device: torch.device) -> None:
    """Have layers that are not converted multiply in float32, if the device has no instructions for bfloat16."""
    if device.type != "cpu" or _cpu_multiplies_bfloat16():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _WideLinear
        elif isinstance(module, Attention):
            module.attend = _attend
