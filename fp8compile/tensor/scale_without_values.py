"""Scales for a quantized parameter that has no values yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.quantizers import Quantizer

__all__ = ["scale_without_values"]


def scale_without_values(quantizer: Quantizer, shape: Sequence[int], value: float, device: torch.device) -> Tensor:
    """Make the scales (dtype ``quantizer.scale_dtype()``) of codes that have no values yet.

    ``shape`` is the scales' shape. ``value`` (1.0, or NaN for codes that stand for NaN) is the multiplier (1 / scale)
    of all blocks, or with two levels of scales the amax of all blocks.
    """
    numbers = torch.full(tuple(shape), value, device=device)
    if quantizer.has_outer_scale():
        return quantizer.block_scale(numbers, torch.full((1,), value, device=device))
    return quantizer.scale_of(numbers)
