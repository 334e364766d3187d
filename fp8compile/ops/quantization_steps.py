"""The steps that quantize a tensor, as Python functions: eager layers call them, and ops have them as kernels.

With one level of scales, the steps are amax, scale and cast; with two levels, amax, outer_amax, two_scales and cast.
Each step calls the quantizer's method, and checks what a user's quantizer returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import dtype_said, is_own, returned, shape_said

__all__ = [
    "PYTHON_OF_STEPS",
    "Scales",
    "Steps",
    "amax",
    "block_multiplier",
    "block_scale",
    "cast",
    "multiplier",
    "outer_amax",
    "outer_scale",
    "scale",
    "scale_of",
    "two_scales",
]

ONE = (1,)  # the shape of an outer amax and of an outer scale

# ---------------------------------------------------------------------------------- one level of scales


def amax(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the largest magnitude of each block, float32."""
    found = quantizer.amax(x)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found
    shape = shape_said(quantizer, "scale_shape", x.shape)
    return returned(found, quantizer, "amax", shape, torch.float32, "what scale_shape says")


def multiplier(amax: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the multiplier (1 / scale) of each block, float32."""
    found = quantizer.multiplier(amax)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found
    return returned(found, quantizer, "multiplier", amax.shape, torch.float32, "that of amax")


def scale_of(multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the scale of each block from its multiplier, in the quantizer's ``scale_dtype()``."""
    found = quantizer.scale_of(multiplier)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found
    what = "that of multiplier, in scale_dtype()"
    return returned(found, quantizer, "scale_of", multiplier.shape, dtype_said(quantizer), what)


def scale(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Compute the multiplier (1 / scale) and the scale of each block."""
    found = multiplier(amax, quantizer)
    return found, scale_of(found, quantizer)


def cast(
    x: Tensor, multiplier: Tensor, quantizer: Quantizer, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Cast values to codes, contiguous uint8.

    ``rows`` and ``columns`` are for codes that depend on positions in the whole tensor: see `Quantizer.cast_at`.
    """
    if rows is None or columns is None:
        found = quantizer.cast(x, multiplier)
    else:
        found = quantizer.cast_at(x, multiplier, rows, columns)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found.contiguous()
    shape = shape_said(quantizer, "codes_shape", x.shape)
    return returned(found, quantizer, "cast", shape, torch.uint8, "what codes_shape says").contiguous()


# ---------------------------------------------------------------------------------- two levels of scales


def outer_amax(amax: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the amax of the whole tensor, (1,) float32, from the amaxes of its blocks."""
    found = quantizer.outer_amax(amax)
    found = returned(found, quantizer, "outer_amax", ONE, torch.float32, "of the full tensor")
    return found.clone() if found is amax or found._is_view() else found


def outer_scale(outer_amax: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the scale of the whole tensor, (1,) float32."""
    found = quantizer.outer_scale(outer_amax)
    return returned(found, quantizer, "outer_scale", ONE, torch.float32, "of the full tensor")


def block_scale(amax: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the scale of each block, which the outer scale multiplies, in the quantizer's ``scale_dtype()``."""
    found, dtype = quantizer.block_scale(amax, outer_amax), dtype_said(quantizer)
    return returned(found, quantizer, "block_scale", amax.shape, dtype, "that of amax, in scale_dtype()")


def block_multiplier(scale: Tensor, outer_scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Compute the multiplier of each block from its scale and the outer scale, float32."""
    found = quantizer.block_multiplier(scale, outer_scale)
    return returned(found, quantizer, "block_multiplier", scale.shape, torch.float32, "that of scale")


def two_scales(amax: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the multiplier and the scale of each block, and the outer scale."""
    outer = outer_scale(outer_amax, quantizer)
    found = block_scale(amax, outer_amax, quantizer)
    return block_multiplier(found, outer, quantizer), found, outer


# ---------------------------------------------------------------------------------- all steps together

Scales = tuple[Tensor, Tensor, Tensor | None]  # multiplier, scale, and with two levels the outer scale


@dataclass(frozen=True)
class Steps:
    """The function of each step: the Python functions of this file for eager mode, or the ops for graphs.

    Eager kernels call the Python functions, because the dispatch of an op costs 10 us.
    """

    amax: Callable[[Tensor, Quantizer], Tensor]
    scale: Callable[[Tensor, Quantizer], tuple[Tensor, Tensor]]
    cast: Callable[..., Tensor]  # (x, multiplier, quantizer); for a part also positions of its rows and columns
    outer_amax: Callable[[Tensor, Quantizer], Tensor]
    two_scales: Callable[[Tensor, Tensor, Quantizer], tuple[Tensor, Tensor, Tensor]]

    def scales(self, amaxes: Tensor, quantizer: Quantizer, outer_amax: Tensor | None = None) -> Scales:
        """Compute the multiplier (1 / scale), the scale and the outer scale (or None) of a matrix.

        ``amaxes`` has an amax for each block. ``outer_amax``, (1,) float32, is that of the matrix; None to compute it.
        """
        if not quantizer.has_outer_scale():
            return *self.scale(amaxes, quantizer), None
        if outer_amax is None:
            outer_amax = self.outer_amax(amaxes, quantizer)
        return self.two_scales(amaxes, outer_amax, quantizer)

    def quantize(
        self, matrix: Plain, quantizer: Quantizer, amaxes: Tensor | None = None, outer_amax: Tensor | None = None
    ) -> Quantized:
        """Quantize a matrix that is whole on this rank; amaxes that are not given are computed."""
        quantizer = quantizer.for_shape(matrix.local.shape)
        amaxes = self.amax(matrix.local, quantizer) if amaxes is None else amaxes
        multiplier, scale, outer_scale = self.scales(amaxes, quantizer, outer_amax)
        codes = self.cast(matrix.local, multiplier, quantizer)
        return Quantized(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer_scale, layout=matrix.layout)


PYTHON_OF_STEPS = Steps(amax, scale, cast, outer_amax, two_scales)
