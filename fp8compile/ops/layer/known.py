"""Known: what is known of a layer's weight before a GEMM runs, so that the GEMM need not compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fp8compile.layout.quantized import Quantized

__all__ = ["Known"]


class Known(NamedTuple):
    """What is known for one GEMM: an op's argument ``known``, a list of tensors and None.

    The list is empty if nothing is known. That of an op that computes an output may have two sets, for the output and
    for grad_input. One set serves both; its FP8 data or amaxes of blocks require that both GEMMs read the same data.

    Attributes:
        codes: The weight's FP8 data, as the recipe quantizes it; a GEMM then reads only shape and dtype of the weight.
        scale: The block scales of ``codes``.
        outer_scale: The global scale of ``codes``; None if there is one level of scales.
        amax: Amaxes of the full weight's blocks. If None, the ranks that shard the weight exchange those they need.
        outer_amax: The amax, (1,) float32, from which the weight's tensorwise or global scale is computed, because
            several weights share the scale.
        multiplier: Multipliers (1 / scale) of input, weight and grad_output, (3,) float32, for delayed scaling.
    """

    codes: Tensor | None = None
    scale: Tensor | None = None
    outer_scale: Tensor | None = None
    amax: Tensor | None = None
    outer_amax: Tensor | None = None
    multiplier: Tensor | None = None

    @staticmethod
    def first_set(known: Sequence[Tensor | None]) -> Known:
        """Return the first set of an argument ``known``: that of the GEMM that the op computes."""
        return Known(*known[:COUNT])

    @staticmethod
    def last_set(known: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the last set of an output's argument ``known``, as the argument ``known`` of grad_input."""
        return known[-COUNT:]

    @staticmethod
    def sets(output: Quantized, grad_input: Quantized) -> list[Tensor | None]:
        """Return the argument ``known`` for a weight that is quantized already, by its FP8 data for both GEMMs."""
        data = (Known(own.codes, own.scale, own.outer_scale) for own in (output, grad_input))
        return [part for each in data for part in each]


COUNT = len(Known._fields)
