"""Scales of codes that stand for no values yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.quantizers import Quantizer

__all__ = ["scale_without_values"]


def scale_without_values(quantizer: Quantizer, shape: Sequence[int], value: float, device: torch.device) -> Tensor:
    """A scale that no values were looked at for.

    Args:
        quantizer: Whose scale it is.
        shape: Of the scale.
        value: The multiplier of all blocks, of two levels the amax of each: 1.0, or NaN for codes that stand for NaN.
        device: Where it is.

    Returns:
        ``shape``, ``quantizer.scale_dtype()``.
    """
    numbers = torch.full(tuple(shape), value, device=device)
    if quantizer.has_outer_scale():
        return quantizer.block_scale(numbers, torch.full((1,), value, device=device))
    return quantizer.scale_of(numbers)
