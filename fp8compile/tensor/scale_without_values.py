"""Scales for codes that have no values yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.quantizers import Quantizer

__all__ = ["scale_without_values"]


def scale_without_values(quantizer: Quantizer, shape: Sequence[int], value: float, device: torch.device) -> Tensor:
    """Make the scales of blocks for codes that have no values yet.

    Args:
        quantizer: The quantizer of the codes.
        shape: Shape of the scale.
        value: The multiplier of all blocks; for two levels of scales, the amax of all blocks. 1.0, or NaN for codes
            that stand for NaN.
        device: The device of the scale.

    Returns:
        A tensor of ``shape``, with dtype ``quantizer.scale_dtype()``.
    """
    numbers = torch.full(tuple(shape), value, device=device)
    if quantizer.has_outer_scale():
        return quantizer.block_scale(numbers, torch.full((1,), value, device=device))
    return quantizer.scale_of(numbers)
