"""DelayedScaling: the scale of a tensor comes from the steps before.

    x --cast by the multiplier of earlier steps--> codes          nothing has to be known of x before it is cast
    x --amax--> into the history --largest or newest--> format_max * 2**-margin / . --> multiplier of the next step

The quantizer is a value like any other, and holds no state: history and multiplier are tensors that its steps are
given and return. A layer keeps them in buffers (``fp8compile.Linear``), and its backward updates them.
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
# the last with which each finite amax has a finite scale: 448 * 2**-8 / float32 max is 2**-127.2
LARGEST_MARGIN = 8


def next_state(
    history: Tensor, multiplier: Tensor, amax: Tensor, room: Tensor, algorithm: str
) -> tuple[Tensor, Tensor]:
    """Histories and multipliers after one more amax for each tensor.

    The oldest amax of a history stands at 1, the newest at the end; entry 0 is the place where an amax joins them, and
    stays as it is: 0, or the amax of what the codes of a weight were made of, where a parameter is these codes.
    A history keeps every amax, and one that is NaN or inf says nothing of the scale: the largest is that of the finite
    ones. Where it (or the newest) is 0, NaN or inf, the multiplier stays as it is.

    Args:
        history: Shape (..., history), float32; zeros at the start.
        multiplier: Shape (...), float32; ones at the start.
        amax: Shape (...), float32, of whole tensors, over all ranks that share the history.
        room: Broadcasts to (...), float64: what an amax is to become, ``DelayedScaling.room()``.
        algorithm: ``"max"`` or ``"most_recent"``.

    Returns:
        History and multiplier anew.
    """
    newest, length = amax.unsqueeze(-1), history.shape[-1]
    place = torch.arange(length, device=history.device)
    # chosen place by place, not put together by cat, which Inductor makes a kernel for each part of
    known = torch.where(place == 0, newest, history)
    known = torch.where(known < torch.inf, known, 0.0)  # false of NaN
    decides = known.amax(-1) if algorithm == "max" else amax
    updated = (room / decides.double()).float().clamp(max=FLOAT32_MAX)  # as exact_quotient, a numerator each
    usable = decides.isfinite() & (decides > 0)
    rolled = torch.where(place == length - 1, newest, history.roll(-1, -1))
    rolled = torch.where(place == 0, history, rolled)
    return rolled, torch.where(usable, updated, multiplier)


@dataclass(frozen=True, repr=False)
class DelayedScaling(Quantizer):
    """Quantizer of a whole tensor whose scale comes from amaxes of earlier steps.

    Attributes:
        format: ``"e4m3"`` or ``"e5m2"``.
        block: (-1, -1): a history is of the whole tensor.
        history: How many amaxes are remembered.
        algorithm: Which of them makes the scale: ``"max"``, the largest, or ``"most_recent"``.
        margin: Powers of two that stay free above the amax, 0 to 8.

    Raises:
        ValueError: A field has no allowed value.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA's TransformerEngine, ``recipe.DelayedScaling``, whose
    history it has element for element. The quotient is rounded once here, and twice there.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"DelayedScaling: format is {self.format!r}; it is 'e4m3' or 'e5m2'.")
        if self.block != (-1, -1):
            raise ValueError(
                f"DelayedScaling: block is {self.block}; it is (-1, -1), for the history is that of a whole tensor. "
                "For smaller blocks take fp8compile.CurrentScaling."
            )
        if type(self.history) is not int or self.history < 1:
            raise ValueError(f"DelayedScaling: history is {self.history!r}; it is a number of steps, 1 or more.")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"DelayedScaling: algorithm is {self.algorithm!r}; it is 'max' or 'most_recent'.")
        if type(self.margin) is not int or not 0 <= self.margin <= LARGEST_MARGIN:
            raise ValueError(
                f"DelayedScaling: margin is {self.margin!r}; it is an int from 0 to {LARGEST_MARGIN}, the powers of "
                "two that stay free above the amax."
            )

    def amax(self, x: Tensor) -> Tensor:
        """The largest magnitude, reduced row by row first.

        A kernel that makes the amax of a whole tensor flat and lays its codes down along columns too, which is what
        the backward needs of a gradient, would scatter them byte by byte; one of rows has tiles.
        """
        if guard_or_false(x.numel() == 0):
            return super().amax(x)
        return block_amax(x, ROWS).amax().float().view(self.scale_shape(x.shape))

    def multiplier(self, amax: Tensor) -> Tensor:
        """Raise, because there is no multiplier without the steps before.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "DelayedScaling: its scale comes from the steps before, not from the values that are quantized. Use it in "
            "a recipe of fp8compile.Linear, or of fp8compile.linear(..., state=...), which keep that state; to "
            "quantize a tensor by itself take fp8compile.CurrentScaling."
        )

    def room(self) -> float:
        """The value to which the amax is scaled: the largest code, less the margin."""
        return self.element_format().max * 2.0**-self.margin  # exact: a power of two

    def next_state(self, history: Tensor, multiplier: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """The function `next_state`, for tensors of this quantizer."""
        room = torch.full((), self.room(), dtype=torch.float64, device=amax.device)
        return next_state(history, multiplier, amax, room, self.algorithm)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Codes of values; each NaN and inf becomes NaN by itself, because the multiplier does not know of it."""
        values = scaled(x, multiplier, self.block)
        # a finite value times a multiplier is no NaN
        codes = self.element_format().encode_numbers(values)  # type: ignore[union-attr]  # never Float4Format
        return torch.where(as_matrix(x).float().abs() < torch.inf, codes, NAN_CODE).reshape(x.shape)
