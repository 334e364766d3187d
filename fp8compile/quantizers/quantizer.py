"""Quantizer: how a tensor becomes codes and scales, as an immutable value.

    x --amax--> amax f32 --multiplier--> f32 --scale_of--> scale f32 or E8M0, what codes are multiplied by
    |                                     |
    +---------- product, round <----------+--> codes uint8

A tensor may have two levels of scales, one for each block and one, in float32, for all of it:

    x --amax--> amax f32 --outer_amax--> f32 (1,) --outer_scale--> f32 (1,), what all values are multiplied by
    |            +--------block_scale------+--> scale           |
    |                                           +--block_multiplier--> f32
    +-------------------- product, round <------------------------+--> codes uint8

The steps are methods, plain PyTorch, and the reference for every backend: the ops call them in eager mode, Inductor
traces through them. The base class gives all but the scale rule; an odd format overrides more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false
from fp8compile.formats import E4M3, E5M2, ELEMENT_FORMATS, Float4Format, Float8Format, element_format
from fp8compile.quantizers.blocks import (
    as_matrix,
    block_amax,
    check_block,
    expand_blocks,
    from_matrix,
    grid_shape,
    scaled,
)
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.declaration import check_steps
from fp8compile.quantizers.scale_rules import exact_quotient

__all__ = ["Quantizer"]


@dataclass(frozen=True, repr=False)
class Quantizer(Constant):
    """Base of quantizers: format, block, and the steps from values to codes and back.

    A quantizer never holds a tensor or a process group, and nothing changes it. It is equal to another one with the
    same class and fields, hashable, picklable, and a constant of compiled graphs. Its steps look at values only; if
    a tensor is spread over ranks, the amax is reduced between two steps (see ``fp8compile.quantize``).

    A subclass defines ``multiplier``, the scale rule. It may override any other step, and the layout: a format that
    packs codes ``codes_shape``, ``values_shape``, ``cast``, ``dequantize`` and ``transposed``; scales in another dtype
    ``scale_dtype``, ``scale_of`` and ``scale_values``; a grid other than that of blocks ``scale_shape``, ``amax``,
    ``cast`` and ``dequantize``. What is missing raises where the class is defined.
    ``class Family(Quantizer, abstract=True)`` is a base of others.

    A quantizer of two levels overrides ``outer_scale``, ``block_scale`` and ``block_multiplier`` in place of
    ``multiplier``. ``dequantize`` leaves the outer scale to its caller: it is one more factor, for the whole tensor.

    ``dequantize`` alone says what codes mean. A GEMM of the hardware reads float8 codes, one a byte, times the scales
    of their blocks, so it multiplies the codes of a class that inherits ``dequantize``. Other codes are multiplied by
    a GEMM that was registered for them (``fp8compile.library.register_gemm``), or else from what ``dequantize``
    returns: on a CPU always, on a GPU if emulation is asked for.

    Attributes:
        format: Format of the codes: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``. A class with a ``cast`` and ``dequantize``
            of its own gives it whatever meaning it has there.
        block: (rows, columns) that share one scale, over the (M, K) view of a tensor; -1 is the whole dim.
    """

    format: str = "e4m3"
    block: tuple[int, int] = (-1, -1)

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            check_steps(cls, Quantizer)

    def __post_init__(self) -> None:
        super().__post_init__()
        element_format(self.format)
        check_block(type(self).__name__, self.block)

    # ------------------------------------------------------------------ layout
    # A packed format (two 4-bit codes a byte) overrides codes_shape and its inverse.

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes of a tensor of this shape."""
        return tuple(shape)

    def values_shape(self, codes_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor that codes of this shape stand for."""
        return tuple(codes_shape)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of amax, multiplier and scale of a tensor of this shape: one entry a block."""
        return grid_shape(shape, self.block)

    def scale_dtype(self) -> torch.dtype:
        """Dtype that scales are stored in."""
        return torch.float32

    def transposed(self) -> Self:
        """The quantizer of the transposed matrix: rows and columns of the block exchanged."""
        return replace(self, block=(self.block[1], self.block[0]))

    def is_local(self) -> bool:
        """Whether a value's code depends on the value and its block alone, not on where in the tensor it stands."""
        return True

    def unpacked(self) -> Quantizer | None:
        """The quantizer of the same codes, one a byte, which can be cut anywhere.

        Returns:
            Itself if it doesn't pack; None if it packs and has no such quantizer: ranks then can't cut or send codes.
        """
        return self if type(self).codes_shape is Quantizer.codes_shape else None

    def code_bits(self) -> int:
        """Bits of a code that carry information: 4 if ranks may send two codes in a byte, else 8."""
        return 8

    def for_shape(self, shape: Sequence[int]) -> Quantizer:
        """The quantizer that a layer uses for a matrix of this shape: itself, or `unpacked` if it can't pack it."""
        return self

    def transform(self) -> tuple[int, ...]:
        """Signs of the orthogonal transform along the summed dim, applied before values are cast; () for none.

        Both operands of a product have the same one.
        """
        return ()

    # ------------------------------------------------------------------ two levels

    def has_outer_scale(self) -> bool:
        """Whether there are two levels of scales: of blocks, and of the whole tensor."""
        return type(self).outer_scale is not Quantizer.outer_scale

    def _one_level(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no outer scale: its scales are those of blocks.")

    def outer_amax(self, amax: Tensor) -> Tensor:
        """The largest amax of all blocks.

        Args:
            amax: Shape ``scale_shape(shape)``, float32.

        Returns:
            Shape (1,), float32; NaN if a block's is NaN, 0 of no blocks. Over ranks, their maximum is that of the
            whole tensor.
        """
        if guard_or_false(amax.numel() == 0):
            return amax.new_zeros((1,))
        return amax.amax().view(1)

    def outer_scale(self, outer_amax: Tensor) -> Tensor:
        """What all values of a tensor are multiplied by, beside the scales of their blocks.

        Args:
            outer_amax: Amax of the whole tensor, shape (1,), float32.

        Returns:
            Shape (1,), float32; NaN where the amax isn't finite.
        """
        raise self._one_level()

    def block_scale(self, amax: Tensor, outer_amax: Tensor) -> Tensor:
        """Scales of blocks, as they are stored.

        Args:
            amax: Shape of the grid, float32.
            outer_amax: Amax of the whole tensor, shape (1,), float32.

        Returns:
            Shape of the grid, in ``scale_dtype()``.
        """
        raise self._one_level()

    def block_multiplier(self, scale: Tensor, outer_scale: Tensor) -> Tensor:
        """What values are multiplied by before they are rounded, from both scales.

        Args:
            scale: Shape of the grid, in ``scale_dtype()``.
            outer_scale: Shape (1,), float32.

        Returns:
            Shape of the grid, float32.
        """
        raise self._one_level()

    # ------------------------------------------------------------------ steps

    def element_format(self) -> Float8Format | Float4Format:
        """The format of the codes."""
        return ELEMENT_FORMATS[self.format]

    def gemm_format(self) -> Float8Format | None:
        """The float8 format in which a GEMM of the hardware may read the codes.

        A class whose own ``dequantize`` computes what the inherited one does overrides this method too, and returns
        the format; ``fp8compile.testing.check_quantizer`` holds it to that.

        Returns:
            ``E4M3`` or ``E5M2`` if the value of a code is that format's number times the scale of its block; None if
            ``dequantize`` is the class's own, or the format another one.
        """
        inherited = type(self).dequantize is Quantizer.dequantize
        stored = self.element_format()
        return stored if inherited and stored in (E4M3, E5M2) else None

    def stores_e8m0(self) -> bool:
        """Whether stored scales are E8M0 bytes, which a GPU's MX GEMM reads as they are."""
        return False

    def amax(self, x: Tensor) -> Tensor:
        """The largest magnitude of each block.

        Args:
            x: Any shape, float32, bfloat16 or float16.

        Returns:
            Shape ``scale_shape(x.shape)``, float32, exact; NaN where a block holds a NaN.
        """
        return block_amax(x, self.block).float()

    def multiplier(self, amax: Tensor) -> Tensor:
        """The scale rule: what values are multiplied by before they are rounded, from the amax of their block.

        Args:
            amax: Shape of the grid, float32, over all ranks that share the block.

        Returns:
            The same shape, float32, positive and finite, or NaN where the amax isn't finite.

        If the quantizer has two levels, ``amax`` is that of a whole tensor, and its largest entry is the outer amax.

        Raises:
            NotImplementedError: The class defines none.
        """
        if not self.has_outer_scale():
            raise NotImplementedError(f"{type(self).__name__} has no scale rule: define multiplier(self, amax).")
        outer_amax = self.outer_amax(amax)
        return self.block_multiplier(self.block_scale(amax, outer_amax), self.outer_scale(outer_amax))

    def scale_of(self, multiplier: Tensor) -> Tensor:
        """The scale that undoes a multiplier: its inverse, correctly rounded, subnormals kept.

        Args:
            multiplier: Shape of the grid, float32.

        Returns:
            The same shape, in ``scale_dtype()``.
        """
        return exact_quotient(1.0, multiplier)

    def scale_values(self, scale: Tensor) -> Tensor:
        """Stored scales as float32 numbers, the same shape."""
        return scale

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Codes of values: product in float32, then one rounding to the format, saturating.

        Args:
            x: Any shape, float32, bfloat16 or float16.
            multiplier: Shape ``scale_shape(x.shape)``, float32.

        Returns:
            Codes, shape ``codes_shape(x.shape)``, uint8.
        """
        values = scaled(x, multiplier, self.block)
        return from_matrix(self.element_format().encode(values), x.shape)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Codes of a part of a tensor, if codes depend on the position of a value (`is_local` returns False).

        Args:
            x: Values, as `cast` takes them.
            multiplier: Multipliers, as `cast` takes them.
            rows: Index in the whole tensor of the first element of each row of the whole that has a row here, (M,)
                int64.
            columns: Column in the whole tensor of each column here, (K,) int64. An element's index is the sum of both.
        """
        return self.cast(x, multiplier)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of codes: codes times scale. An outer scale is left to the caller.

        Args:
            codes: Shape ``codes_shape(shape)``, uint8.
            scale: Shape ``scale_shape(shape)``, in ``scale_dtype()``.
            dtype: float32, in which the product is rounded once, or float64, in which it is exact.

        Returns:
            Shape ``shape``, ``dtype``.
        """
        scale_values = expand_blocks(self.scale_values(scale).to(dtype), codes.shape, self.block)
        return from_matrix(self.element_format().decode(as_matrix(codes)).to(dtype) * scale_values, codes.shape)
