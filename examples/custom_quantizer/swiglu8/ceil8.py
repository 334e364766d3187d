"""Ceil8: E4M3 codes with a scale for each 64 elements of a row, a power of two at or above amax / 448.

    amax = f * 2**e, 1 <= f < 2          448 = 1.75 * 2**8
    scale = 2**(e - 8) if f <= 1.75 else 2**(e - 7)

The exponent is read from the bits: no quotient, so nothing to round, and no value ever is beyond 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.library import Quantizer, Recipe

__all__ = ["Ceil8", "inference_recipe"]

MANTISSA_BITS = 23
BIAS = 127
LARGEST_EXPONENT = 8
LARGEST_FRACTION = int(0.75 * 2**MANTISSA_BITS)  # of 1.75


@dataclass(frozen=True, repr=False)
class Ceil8(Quantizer):
    """E4M3, 1x64 blocks, scales rounded up to a power of two: scaling rounds nothing and saturates nothing."""

    format: str = "e4m3"
    block: tuple[int, int] = (1, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "e4m3":
            raise ValueError(f"Ceil8: format is {self.format!r}; its rule is that of 'e4m3'.")

    def multiplier(self, amax: Tensor) -> Tensor:
        """The inverse of the scale, at most 2**127; 1 for a block of zeros, NaN for one that isn't finite."""
        bits = amax.view(torch.int32)
        exponent, fraction = bits >> MANTISSA_BITS, bits & ((1 << MANTISSA_BITS) - 1)
        scale_exponent = exponent - LARGEST_EXPONENT + (fraction > LARGEST_FRACTION).to(torch.int32)
        power = (2 * BIAS - scale_exponent).clamp(max=2 * BIAS) << MANTISSA_BITS
        multiplier = torch.where(amax <= 0, 1.0, power.view(torch.float32))
        return torch.where(amax.isfinite(), multiplier, torch.nan)


def inference_recipe() -> Recipe:
    """Ceil8 for the output alone; both gradients in high precision."""
    return Recipe(input=Ceil8(), weight=Ceil8())
