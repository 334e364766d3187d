"""DelayedScaling: scale a tensor by its amaxes of earlier steps, without reading it before the cast.

The quantizer holds no state. Its methods take and return the history of amaxes and the multiplier (1 / scale) as
tensors; a layer (``fp8compile.Linear``) keeps them in buffers, and its backward updates them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false
from fp8compile.formats import FLOAT32_MAX, NAN_CODE
from fp8compile.quantizers.blocks import as_matrix, block_amax, scaled
from fp8compile.quantizers.quantizer import Quantizer

__all__ = ["DelayedScaling", "next_state"]

ALGORITHMS = ("max", "most_recent")
ROWS = (1, -1)
# the largest margin with which each finite amax has a finite scale: 448 * 2**-8 / float32 max is 2**-127.2
LARGEST_MARGIN = 8


def next_state(
    history: Tensor, multiplier: Tensor, amax: Tensor, room: Tensor, algorithm: str
) -> tuple[Tensor, Tensor]:
    """Append an amax to each history, and compute the next multipliers (1 / scale) of delayed scaling.

    In a history, the oldest amax is at index 1 and the newest at the end. Index 0 is not changed: it holds 0, or a
    quantized parameter's amax when its codes were made. The next multiplier comes from the history's largest finite
    amax, or from the newest; if that amax is 0, NaN or infinite, the multiplier stays.

    Args:
        history: Shape (..., history), float32; zeros at the start.
        multiplier: Shape (...), float32; ones at the start.
        amax: Shape (...), float32, the amaxes of whole tensors, over all ranks that share the history.
        room: Broadcasts to (...), float64, the value to which the amax is scaled, ``DelayedScaling.room()``.
        algorithm: ``"max"`` or ``"most_recent"``.

    Returns:
        The new history and the new multiplier.
    """
    newest, length = amax.unsqueeze(-1), history.shape[-1]
    place = torch.arange(length, device=history.device)
    # torch.where instead of cat, because Inductor makes a kernel for each part of a cat
    known = torch.where(place == 0, newest, history)
    known = torch.where(known < torch.inf, known, 0.0)  # the comparison is False for NaN
    decides = known.amax(-1) if algorithm == "max" else amax
    updated = (room / decides.double()).float().clamp(max=FLOAT32_MAX)  # see exact_quotient; a numerator each
    usable = decides.isfinite() & (decides > 0)
    rolled = torch.where(place == length - 1, newest, history.roll(-1, -1))
    rolled = torch.where(place == 0, history, rolled)
    return rolled, torch.where(usable, updated, multiplier)


@dataclass(frozen=True, repr=False)
class DelayedScaling(Quantizer):
    """Tensorwise quantizer that computes the scale from the amaxes of earlier steps.

    Attributes:
        format: ``"e4m3"`` or ``"e5m2"``.
        block: (-1, -1), because a history belongs to the full tensor.
        history: Length of the amax history.
        algorithm: Which amax of the history determines the scale: ``"max"`` for the largest, ``"most_recent"`` for the
            newest.
        margin: Headroom in powers of two between the scaled amax and the largest value of the format, 0 to 8.

    Raises:
        ValueError: A field has a value that is not allowed.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA's TransformerEngine, ``recipe.DelayedScaling``. The
    history equals TransformerEngine's element for element, but the quotient is rounded once instead of twice.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"DelayedScaling: `format` is {self.format!r}; it must be 'e4m3' or 'e5m2'.")
        if self.block != (-1, -1):
            raise ValueError(
                f"DelayedScaling: `block` is {self.block}; it must be (-1, -1), because the history stores one amax "
                "for the full tensor. For smaller blocks use fp8compile.CurrentScaling."
            )
        if type(self.history) is not int or self.history < 1:
            raise ValueError(f"DelayedScaling: `history` is {self.history!r}; it must be an int of at least 1.")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"DelayedScaling: `algorithm` is {self.algorithm!r}; it must be 'max' or 'most_recent'.")
        if type(self.margin) is not int or not 0 <= self.margin <= LARGEST_MARGIN:
            raise ValueError(
                f"DelayedScaling: `margin` is {self.margin!r}; it must be an int from 0 to {LARGEST_MARGIN}, the "
                "number of powers of two left free above the amax."
            )

    def amax(self, x: Tensor) -> Tensor:
        """Compute the largest magnitude of the tensor, reduced first within each row and then over rows.

        With this order, a fused kernel can also write a gradient's transposed FP8 data tile by tile. With a flat
        reduction, its writes would not be coalesced.
        """
        if guard_or_false(x.numel() == 0):
            return super().amax(x)
        return block_amax(x, ROWS).amax().float().view(self.scale_shape(x.shape))

    def multiplier(self, amax: Tensor) -> Tensor:
        """Raise a RuntimeError, because the multiplier comes from earlier steps and not from an amax."""
        raise RuntimeError(
            "DelayedScaling: its scale comes from previous steps and not from the values that are quantized. Use "
            "it in a recipe of fp8compile.Linear or of fp8compile.linear(..., state=...), which keep its state. To "
            "quantize a single tensor, use fp8compile.CurrentScaling."
        )

    def room(self) -> float:
        """Return the value to which the amax is scaled: the format's largest number times 2**-margin."""
        return self.element_format().max * 2.0**-self.margin  # exact, because the factor is a power of two

    def next_state(self, history: Tensor, multiplier: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Call the function `next_state` of this module with this quantizer's ``room()`` and ``algorithm``."""
        room = torch.full((), self.room(), dtype=torch.float64, device=amax.device)
        return next_state(history, multiplier, amax, room, self.algorithm)

    def multiplier_for_write(self, history: Tensor, multiplier: Tensor, amax: Tensor) -> Tensor:
        """Return the multiplier for new values of a quantized parameter, whose amax is known.

        This is ``multiplier`` if an earlier step has set it, as for a weight in high precision. Otherwise
        ``multiplier`` is still 1, which would lose small values, so the multiplier is computed from ``amax``.
        """
        before = torch.where(history[1:] < torch.inf, history[1:], 0.0)
        _, own = self.next_state(torch.zeros_like(history), multiplier, amax)
        return torch.where((multiplier == 1) & (before == 0).all(), own, multiplier)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Cast values to FP8. NaN and infinity become NaN.

        ``multiplier`` (1 / scale), from earlier steps, is always finite, so it can't cause NaNs.
        """
        values = scaled(x, multiplier, self.block)
        # encode_numbers, because a finite value times a multiplier is never NaN
        codes = self.element_format().encode_numbers(values)  # type: ignore[union-attr]  # never Float4Format
        return torch.where(as_matrix(x).float().abs() < torch.inf, codes, NAN_CODE).reshape(x.shape)
