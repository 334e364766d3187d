"""Signal-to-noise ratios in decibels: 6 dB are one bit, and 20 dB are one decimal digit."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["shown_decibels", "sqnr"]


def _rows_apart(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    exact = expected.detach().double()
    error = actual.detach().double() - exact
    return exact.square().sum().item(), error.square().sum().item()


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal-to-noise ratio 10 log10(sum expected^2 / sum (actual - expected)^2), in dB.

    Args:
        actual: Any shape and floating dtype.
        expected: The same shape.

    Returns:
        ``inf`` if no element differs. ``nan`` if there is a difference and no signal, or a NaN. ``-inf`` if the
        difference is infinite.
    """
    signal, noise = _rows_apart(actual, expected)
    if noise == 0:
        return math.inf
    if signal == 0 or not math.isfinite(signal) or math.isnan(noise):
        return math.nan
    return -math.inf if math.isinf(noise) else 10 * math.log10(signal / noise)


def shown_decibels(value: float | None) -> str:
    """Format a ratio for a table: one decimal; ``"equal"`` for no difference; ``"-"`` if not measured."""
    if value is None:
        return "-"
    return "equal" if value == math.inf else f"{value:.1f}"
