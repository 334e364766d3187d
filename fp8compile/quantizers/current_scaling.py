"""CurrentScaling: the scale of a tensor comes from its own values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.formats import E8M0, FLOAT32_MAX
from fp8compile.quantizers.blocks import scaled
from fp8compile.quantizers.quantizer import Quantizer
from fp8compile.quantizers.scale_rules import SCALE_RULES
from fp8compile.quantizers.stochastic_rounding import check_rounding, noise

__all__ = ["CurrentScaling"]


@dataclass(frozen=True, repr=False)
class CurrentScaling(Quantizer):
    """Quantizer that computes the scale from the amax of the tensor being quantized.

    Attributes:
        format: ``"e4m3"`` (3 mantissa bits, largest value 448) or ``"e5m2"`` (2 mantissa bits, largest value 57344).
        block: (rows, columns) that share one scale: (-1, -1) tensorwise, (1, -1) rowwise, (-1, 1) columnwise, (1,
            128), (128, 128), or any other shape.
        scale: The scale rule. ``"fp32"``: values are multiplied by format_max / amax. ``"pow2"``: the same, rounded
            down to a power of two. ``"e8m0_rceil"`` and ``"e8m0_floor"``: scales are powers of two stored as one byte,
            as in the MX formats.
        eps: Lower bound of the amax. Smaller amaxes are replaced by it; 0 disables the bound.
        rounding: Rounding mode. ``"nearest"`` rounds ties to even. ``"stochastic"``, meant for gradients, rounds up or
            down at random such that the expected error is 0; see `fp8compile.quantizers.stochastic_rounding`.
        seed: Seed of stochastic rounding.

    Raises:
        ValueError: A field has a value that is not allowed.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; for the E8M0 rules see ``fp8compile.quantizers.scale_rules``.
    """

    scale: str = "fp32"
    eps: float = 0.0
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(
                f"CurrentScaling: `format` is {self.format!r}; it must be 'e4m3' or 'e5m2'. FP4 formats require two "
                "levels of scales: fp8compile.TwoLevelScaling."
            )
        if self.scale not in SCALE_RULES:
            allowed = ", ".join(repr(rule) for rule in SCALE_RULES)
            raise ValueError(f"CurrentScaling: `scale` is {self.scale!r}; it must be one of {allowed}.")
        number = isinstance(self.eps, (int, float)) and not isinstance(self.eps, bool)
        if not number or not 0 <= self.eps <= FLOAT32_MAX:
            raise ValueError(
                f"CurrentScaling: `eps` is {self.eps!r}; it must be a number from 0 to the largest float32, the "
                "lower bound of the amax."
            )
        check_rounding("CurrentScaling", self.rounding, self.seed)

    def stores_e8m0(self) -> bool:
        """Whether scales are stored as E8M0 bytes, as with the rules ``"e8m0_rceil"`` and ``"e8m0_floor"``."""
        return self.scale.startswith("e8m0")

    def scale_dtype(self) -> torch.dtype:
        """uint8 for E8M0, else float32."""
        return torch.uint8 if self.stores_e8m0() else torch.float32

    def is_local(self) -> bool:
        """Whether quantizing a value depends only on its block; False for stochastic rounding, which adds noise."""
        return self.rounding == "nearest"

    def multiplier(self, amax: Tensor) -> Tensor:
        """Compute each block's multiplier (1 / scale) from its amax with the rule ``self.scale``."""
        return SCALE_RULES[self.scale](amax, self.element_format(), self.eps)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Multiply values by ``multiplier`` in float32, then round once with ``self.rounding``, saturating.

        ``multiplier`` (1 / scale) has one entry per block. Returns the quantized values as uint8.
        """
        if self.rounding == "nearest":
            return super().cast(x, multiplier)
        return self._stochastic(x, multiplier)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Cast part of a tensor, with noise determined by the positions of its elements in the full tensor.

        ``rows`` has the position of each row's first element, ``columns`` the offset of each column; int64.
        """
        if self.rounding == "nearest":
            return super().cast(x, multiplier)
        return self._stochastic(x, multiplier, rows, columns)

    def _stochastic(self, x: Tensor, multiplier: Tensor, *where: Tensor) -> Tensor:
        values = scaled(x, multiplier, self.block)
        return self.element_format().encode_stochastic(values, noise(values, self.seed, *where)).reshape(x.shape)

    def scale_of(self, multiplier: Tensor) -> Tensor:
        """The scale, 1 / multiplier, as float32 or as an E8M0 byte."""
        return E8M0.encode_inverses(multiplier) if self.stores_e8m0() else super().scale_of(multiplier)

    def scale_values(self, scale: Tensor) -> Tensor:
        """Stored scales as float32 numbers."""
        return E8M0.decode(scale) if self.stores_e8m0() else scale
