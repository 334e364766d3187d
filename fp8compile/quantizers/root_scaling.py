"""RootScaling: quantize non-negative values by their square roots, so that no positive value becomes 0.

    v --square root--> root --amax, scale, cast--> codes, at least 1 where v > 0, and scale;    v ~= (codes * scale)**2

A root has half the exponents of its value: a block of e4m3 codes reaches down to 2**-35 of its largest value, where
codes of the values themselves reach down to 2**-18.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.quantizers.current_scaling import CurrentScaling
from fp8compile.quantizers.scale_rules import exact_root

__all__ = ["RootScaling"]


@dataclass(frozen=True, repr=False)
class RootScaling(CurrentScaling):
    """Quantizer of values that are never negative: codes and scales are those of their square roots.

    An optimizer divides by such values, so a value above 0 never gets the code 0, however large its neighbours are.
    A value below 0 makes its whole block NaN. The amax of a block is that of its roots. Fields are those of
    ``CurrentScaling``. Stochastic rounding has no bias in the root; the square of the root is too large on average,
    by the variance of the rounding.
    """

    def amax(self, x: Tensor) -> Tensor:
        """The largest root of each block, ``scale_shape(x.shape)``, float32; NaN if a value is NaN or below 0."""
        return super().amax(exact_root(x.float()))

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Cast the square roots of values; a value above 0 gets at least the smallest code above 0."""
        return _above_zero(super().cast(exact_root(x.float()), multiplier), x)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Cast a part of a tensor; its positions ``rows`` and ``columns`` in the whole tensor decide the noise."""
        return _above_zero(super().cast_at(exact_root(x.float()), multiplier, rows, columns), x)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The squares of codes times the scales of their blocks, each product rounded once to ``dtype``."""
        return super().dequantize(codes, scale, dtype).square()


def _above_zero(codes: Tensor, x: Tensor) -> Tensor:
    """The codes, with 1 in place of each 0 whose value in ``x`` is above 0."""
    return torch.where((codes == 0) & (x > 0), 1, codes)
