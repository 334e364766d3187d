"""RootScaling: quantize non-negative values by their square roots; no positive value becomes 0.

    v --square root--> root --amax, scale, cast--> codes, at least 1 where v > 0, and scale;    v ~= (codes * scale)**2

A root has half the exponent of its value: e4m3 codes of roots represent values down to 2**-35 of the block's largest,
codes of the values themselves down to 2**-18.
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
    """Quantizer of values that are never negative, such as second moments, by their square roots.

    An optimizer divides by such values, so a value above 0 never gets the code 0, however large its neighbours are. A
    value below 0 makes its whole block NaN. The amax of a block is the largest root. Fields are those of
    ``CurrentScaling``. Stochastic rounding has no bias in the root, but makes squares too large by its variance.
    """

    def amax(self, x: Tensor) -> Tensor:
        """Compute the largest square root in each block, float32; NaN if a value is NaN or below 0.

        The result has shape ``scale_shape(x.shape)``.
        """
        return super().amax(exact_root(x.float()))

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Cast the square roots of values; a value above 0 gets at least the smallest code above 0.

        ``multiplier`` (1 / scale) has an entry for each block. Returns codes, uint8.
        """
        return _above_zero(super().cast(exact_root(x.float()), multiplier), x)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Cast roots of a part of a tensor, with noise from positions of its elements in the whole tensor.

        ``rows`` has the position of each row's first element, ``columns`` the offset of each column; int64.
        """
        return _above_zero(super().cast_at(exact_root(x.float()), multiplier, rows, columns), x)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute the squares of codes times their blocks' scales, each product rounded once to ``dtype``."""
        return super().dequantize(codes, scale, dtype).square()


def _above_zero(codes: Tensor, x: Tensor) -> Tensor:
    return torch.where((codes == 0) & (x > 0), 1, codes)
