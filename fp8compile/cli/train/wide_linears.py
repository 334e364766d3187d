"""Linears that multiply bfloat16 numbers in float32, for CPUs without instructions for bfloat16.

PyTorch multiplies bfloat16 on such a CPU (AVX2 alone: most AMD desktops before Zen 4, Intel's before Alder Lake) by a
loop that is some forty times slower than its float32 product, so that the contenders in bfloat16 would take the time
of `make train`. A float32 product of bfloat16 numbers, rounded once, is what an instruction for them computes: their
products are exact in float32, and both add these up in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from fp8compile import _compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["widen_linears"]


class _WideLinear(nn.Linear):
    """A linear under autocast to bfloat16, whose three products are of float32 numbers and rounded to bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), bfloat16."""
        x, weight = input.bfloat16().float(), self.weight.bfloat16().float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(x, weight).bfloat16()


def widen_linears(model: nn.Module, device: torch.device) -> None:
    """Have the plain linears of a model multiply in float32, where the device multiplies no bfloat16 by itself.

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
