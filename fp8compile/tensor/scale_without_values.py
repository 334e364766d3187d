"""Scales for codes that are still to be written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile.quantizers import Quantizer

__all__ = ["scale_without_values"]


def scale_without_values(quantizer: Quantizer, shape: Sequence[int], value: float, device: torch.device) -> Tensor:
    """Make scales of shape ``shape`` and dtype ``quantizer.scale_dtype()`` for codes that are still to be written.

    ``value`` is the multiplier (1 / scale) of every block, or with two levels of scales its amax: 1.0 for codes of
    zeros, and NaN for codes that nobody may read, because they then stand for NaN.
    """
    numbers = torch.full(tuple(shape), value, device=device)
    if quantizer.has_outer_scale():
        return quantizer.block_scale(numbers, torch.full((1,), value, device=device))
    return quantizer.scale_of(numbers)
