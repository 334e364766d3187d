"""Quantizer: how a tensor becomes codes and scales, as an immutable value.

    x --amax--> amax f32 --multiplier--> f32 --scale_of--> scale f32 or E8M0, the factor of codes
    |                                     |
    +---------- product, round <----------+--> codes uint8

With two levels of scales, ``outer_scale``, ``block_scale`` and ``block_multiplier`` replace ``multiplier``. The steps
are written in plain PyTorch: ops call them in eager mode, Inductor traces through them, and every backend gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false, without_elements
from fp8compile.formats import E4M3, E5M2, ELEMENT_FORMATS, Float4Format, Float8Format, element_format
from fp8compile.quantizers.blocks import (
    Block,
    as_matrix,
    block_amax,
    check_block,
    expand_blocks,
    from_matrix,
    grid_shape,
    scaled,
)
from fp8compile.quantizers.check_declaration import check_steps
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.scale_rules import exact_quotient

__all__ = ["Quantizer", "transposed", "with_block"]


@dataclass(frozen=True, repr=False)
class Quantizer(Constant):
    """Base class of quantizers: format, block, and the steps to quantize and dequantize.

    A quantizer is immutable and never holds a tensor or a process group. Quantizers with the same class and fields are
    equal. They can be hashed and pickled, and are constants in compiled graphs. The steps depend only on values. For a
    tensor that is sharded over ranks, the amax is reduced between two steps (see ``fp8compile.quantize``).

    A subclass defines ``multiplier``, the scale rule. It may override any other method, but some must be overridden
    together:

    - A packed format overrides ``codes_shape``, ``values_shape``, ``cast``, ``dequantize`` and ``transposed``.
    - Scales in another dtype need ``scale_dtype``, ``scale_of`` and ``scale_values``.
    - A grid of scales that does not follow the blocks needs ``scale_shape``, ``amax``, ``cast`` and ``dequantize``.
    - Two levels of scales need ``outer_scale``, ``block_scale`` and ``block_multiplier`` instead of ``multiplier``.
      ``dequantize`` leaves the global scale to its caller, because it is one factor for the full tensor.

    If one of these methods is missing, defining the class raises a TypeError. ``class Family(Quantizer,
    abstract=True)`` defines a base class of other quantizers, which is not checked.

    ``dequantize`` defines what quantized values mean. Hardware GEMMs multiply float8 values, one per byte, and apply
    the scales of their blocks, like the inherited ``dequantize``. A class that overrides ``dequantize`` needs a GEMM
    registered for it (``fp8compile.library.register_gemm``). Without such a GEMM, the dequantized values are
    multiplied: always on a CPU, and on a GPU only with emulation.

    Attributes:
        format: Format of the quantized values: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``. A class with its own ``cast`` and
            ``dequantize`` may give it another meaning.
        block: (rows, columns) that share one scale, over the (M, K) view of a tensor; -1 is the full dim.
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
    # A packed format (two 4-bit codes in each byte) overrides codes_shape and its inverse.

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the quantized data of a tensor of shape ``shape``; by default the same shape."""
        return tuple(shape)

    def values_shape(self, codes_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor whose quantized data has shape ``codes_shape``; inverse of `codes_shape`."""
        return tuple(codes_shape)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the amax, multiplier and scale of a tensor of shape ``shape``: one entry per block."""
        return grid_shape(shape, self.block)

    def scale_dtype(self) -> torch.dtype:
        """Dtype in which scales are stored."""
        return torch.float32

    def transposed(self) -> Self:
        """The quantizer of the transposed matrix, whose block has rows and columns exchanged."""
        return replace(self, block=(self.block[1], self.block[0]))

    def is_local(self) -> bool:
        """Whether quantizing a value depends only on the value and its block, not on its position in the tensor."""
        return True

    def unpacked(self) -> Quantizer | None:
        """The quantizer that stores the same values one per byte, so that they can be sharded anywhere.

        None if the format is packed and has no unpacked form. Such data can't be sharded or communicated.
        """
        return self if type(self).codes_shape is Quantizer.codes_shape else None

    def code_bits(self) -> int:
        """Return the number of bits to communicate per value: 4 if two values fit into a byte, else 8."""
        return 8

    def for_shape(self, shape: Sequence[int]) -> Quantizer:
        """The quantizer for a layer's matrix: this one, or `unpacked` if ``shape`` can't be packed."""
        return self

    def transform(self) -> tuple[int, ...]:
        """Signs of the random Hadamard transform applied before the cast; () for no transform.

        The transform runs along a GEMM's contraction dim. Both operands of a GEMM have the same transform.
        """
        return ()

    # ------------------------------------------------------------------ two levels

    def has_outer_scale(self) -> bool:
        """Whether there are two levels of scales: one scale per block, and one global scale per tensor."""
        return type(self).outer_scale is not Quantizer.outer_scale

    def _one_level(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no global scale, only scales of blocks.")

    def outer_amax(self, amax: Tensor) -> Tensor:
        """Compute the largest of all blocks' amaxes, (1,) float32; NaN if one is NaN, 0 without blocks.

        ``amax`` has shape ``scale_shape(shape)``, float32.
        """
        if guard_or_false(amax.numel() == 0):
            return without_elements(amax.new_zeros((1,)), amax)
        return amax.amax().view(1)

    def outer_scale(self, outer_amax: Tensor) -> Tensor:
        """Compute the global scale, (1,) float32, which applies to the full tensor in addition to the block scales.

        ``outer_amax`` is the amax of the full tensor, (1,) float32. If it is not finite, the scale is NaN.
        """
        raise self._one_level()

    def block_scale(self, amax: Tensor, outer_amax: Tensor) -> Tensor:
        """Compute the block scales as stored: in ``scale_dtype()``, shape ``scale_shape(shape)``.

        ``amax`` has the same shape, float32; ``outer_amax``, (1,) float32, is the amax of the full tensor.
        """
        raise self._one_level()

    def block_multiplier(self, scale: Tensor, outer_scale: Tensor) -> Tensor:
        """Compute the block multipliers (1 / scale) from both scales: float32, in the shape of ``scale``.

        ``scale`` is the result of `block_scale`, and ``outer_scale`` is the global scale, (1,) float32.
        """
        raise self._one_level()

    # ------------------------------------------------------------------ steps

    def element_format(self) -> Float8Format | Float4Format:
        """The element format as an object that encodes and decodes: E4M3, E5M2 or E2M1."""
        return ELEMENT_FORMATS[self.format]

    def gemm_format(self) -> Float8Format | None:
        """Float8 format in which a hardware GEMM may read the data, ``E4M3`` or ``E5M2``, or None.

        A GEMM may read the data if each byte represents the float8 number with the same bits, times the scale of its
        block. A class with its own ``dequantize`` may return a format if that method gives the same values as the
        inherited one; ``fp8compile.testing.check_quantizer`` checks this.
        """
        inherited = type(self).dequantize is Quantizer.dequantize
        stored = self.element_format()
        return stored if inherited and stored in (E4M3, E5M2) else None

    def stores_e8m0(self) -> bool:
        """Whether stored scales are E8M0 bytes, which a GPU's MX GEMM can read directly."""
        return False

    def amax(self, x: Tensor) -> Tensor:
        """Compute the exact largest magnitude of each block in float32; NaN for a block that contains a NaN.

        ``x`` has any shape, float32, bfloat16 or float16. The result has shape ``scale_shape(x.shape)``.
        """
        return block_amax(x, self.block).float()

    def multiplier(self, amax: Tensor) -> Tensor:
        """Compute the block multipliers (1 / scale) from the amaxes: the scale rule.

        Values are multiplied and then rounded. If the quantizer has two levels, ``amax`` has all blocks of a tensor,
        and its largest entry is the global amax.

        Args:
            amax: Shape of the grid, float32, reduced over all ranks that share the block.

        Returns:
            The same shape, float32, positive and finite; NaN for an amax that is not finite.
        """
        if not self.has_outer_scale():
            raise NotImplementedError(
                f"{type(self).__name__} has no scale rule: define multiplier(self, amax), which returns what values "
                "are multiplied by before the cast, such as 448 / amax."
            )
        outer_amax = self.outer_amax(amax)
        return self.block_multiplier(self.block_scale(amax, outer_amax), self.outer_scale(outer_amax))

    def scale_of(self, multiplier: Tensor) -> Tensor:
        """Compute the scale that undoes a float32 multiplier: its correctly rounded reciprocal.

        The scale has dtype ``scale_dtype()`` and the shape of the multiplier. Subnormals are kept.
        """
        return exact_quotient(1.0, multiplier)

    def scale_values(self, scale: Tensor) -> Tensor:
        """Decode stored scales to float32, in the same shape."""
        return scale

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Cast values to the format: multiply in float32, then round once, saturating.

        Args:
            x: Any shape, float32, bfloat16 or float16.
            multiplier: The multiplier (1 / scale) of each block, shape ``scale_shape(x.shape)``, float32.

        Returns:
            Quantized data, shape ``codes_shape(x.shape)``, uint8.
        """
        values = scaled(x, multiplier, self.block)
        return from_matrix(self.element_format().encode(values), x.shape)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Cast part of a tensor if the result depends on positions; called if `is_local` returns False.

        ``x`` and ``multiplier`` are as in `cast`. The position of an element, its index in the full flattened tensor,
        is the sum of two int64 tensors: ``rows`` (M,) has the position of each row's first element, ``columns`` (K,)
        the offset of each column.
        """
        return self.cast(x, multiplier)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiply quantized values by their block scales. The caller applies a global scale.

        Args:
            codes: Shape ``codes_shape(shape)``, uint8.
            scale: Shape ``scale_shape(shape)``, in ``scale_dtype()``.
            dtype: float32, which rounds the result once, or float64, which is exact.

        Returns:
            Shape ``shape``, ``dtype``.
        """
        scale_values = expand_blocks(self.scale_values(scale).to(dtype), codes.shape, self.block)
        # The product promotes the codes. Converted before it, PyTorch 2.11 would make one conversion of the two from
        # float8, and for float8 to float64 Triton 3.6 aborts the process.
        return from_matrix(self.element_format().decode(as_matrix(codes)) * scale_values, codes.shape)


# ---------------------------------------------------------------------------------- derived from another one
# cached because the constructor's checks would slow down each eager call


@lru_cache(maxsize=256)
def transposed(quantizer: Quantizer) -> Quantizer:
    """Return ``quantizer.transposed()``, cached."""
    return quantizer.transposed()


def with_block(quantizer: Quantizer, block: Block) -> Quantizer:
    """Return a copy of the quantizer with another block, (rows, columns); -1 is the whole dim."""
    try:
        return _with_block(quantizer, block)
    except TypeError:  # symbols for sizes have no hash
        return replace(quantizer, block=block)


@lru_cache(maxsize=256)
def _with_block(quantizer: Quantizer, block: Block) -> Quantizer:
    return replace(quantizer, block=block)
