"""TwoLevelScaling: four-bit codes, e4m3 scales of 16 values, one float32 scale of the tensor (NVFP4).

    x --(random Hadamard transform)--> amax of blocks --> outer amax --> scales --> codes e2m1 --> two of them a byte

`dequantize` undoes the transform without error, because codes and sums of sixteen codes are exact in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile._compat import statically_true
from fp8compile.formats import E4M3, Float8Format, unpack
from fp8compile.quantizers.blocks import as_matrix, expand_blocks, from_matrix, scaled
from fp8compile.quantizers.hadamard import GROUP, inverse_hadamard, is_signs, random_hadamard
from fp8compile.quantizers.quantizer import Quantizer
from fp8compile.quantizers.stochastic_rounding import ROUNDINGS, check_rounding, noise, positions
from fp8compile.quantizers.two_level_rules import TWO_LEVEL_RULES, TwoLevelRule

__all__ = ["TwoLevelScaling"]

ROWS, COLUMNS, SQUARE = (1, GROUP), (GROUP, 1), (GROUP, GROUP)
PAIRS = {"rows": 1, "columns": 0}  # the dim of the matrix whose neighbours share a byte
OTHER = {"rows": "columns", "columns": "rows", "none": "none"}


@dataclass(frozen=True, repr=False)
class TwoLevelScaling(Quantizer):
    """Quantizer to e2m1 (FP4), with block scales and a global scale per tensor.

    Attributes:
        format: ``"e2m1"``.
        block: Shape of the blocks that share a scale: (1, 16), (16, 1) or (16, 16).
        packed: Which two values share a byte: ``"rows"`` for neighbours in a row, ``"columns"`` for neighbours in a
            column, ``"none"`` for one value per byte. This does not change the values.
        scale: The rule for both scales, ``"transformer_engine"``, ``"reciprocal"`` or ``"torchao"``. ``"reciprocal"``
            is TransformerEngine's rule, with global scales that survive a round trip through a checkpoint that stores
            1 / scale. The Triton kernels of this package do not support ``"reciprocal"``.
        rounding: Rounding mode: ``"nearest"`` or ``"stochastic"`` as in ``CurrentScaling``, or
            ``"stochastic_hardware"``, which uses the GPU's rounding instruction in kernels for compute capability
            10.x. This is faster, but uses different random bits than a CPU, so results differ.
        seed: Seed of stochastic rounding.
        hadamard: Sixteen signs, each 1 or -1, of a random Hadamard transform along the block's sixteen values; empty
            for no transform. With a transform, blocks must be (1, 16) or (16, 1).

    Raises:
        ValueError: A field has a value that is not allowed.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
    """

    format: str = "e2m1"
    block: tuple[int, int] = ROWS
    packed: str = "rows"
    scale: str = "transformer_engine"
    rounding: str = "nearest"
    seed: int = 0
    hadamard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "e2m1":
            raise ValueError(f"TwoLevelScaling: `format` is {self.format!r}; it must be 'e2m1'.")
        if self.block not in (ROWS, COLUMNS, SQUARE):
            raise ValueError(f"TwoLevelScaling: `block` is {self.block}; it must be (1, 16), (16, 1) or (16, 16).")
        if self.packed not in OTHER or (self.block, self.packed) in ((ROWS, "columns"), (COLUMNS, "rows")):
            raise ValueError(
                f"TwoLevelScaling: `packed` is {self.packed!r} with block {self.block}; it must be 'rows' for (1, "
                "16), 'columns' for (16, 1), either for (16, 16), or 'none'."
            )
        if self.scale not in TWO_LEVEL_RULES:
            raise ValueError(
                f"TwoLevelScaling: `scale` is {self.scale!r}; it must be one of "
                f"{', '.join(map(repr, TWO_LEVEL_RULES))}."
            )
        check_rounding("TwoLevelScaling", self.rounding, self.seed, (*ROUNDINGS, "stochastic_hardware"))
        if self.hadamard and (not is_signs(self.hadamard) or self.block == SQUARE):
            raise ValueError(
                f"TwoLevelScaling: `hadamard` is {self.hadamard!r} with block {self.block}; it must be (), or a "
                "tuple of sixteen 1 and -1 with block (1, 16) or (16, 1)."
            )

    # ------------------------------------------------------------------ layout

    def _summed_dim(self) -> int:
        """Return the dim, 0 or 1, along which sixteen values share a scale and the transform runs."""
        return 1 if self.block == ROWS else 0

    def _codes_matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of the codes of a tensor of shape ``shape``, with one code per byte."""
        sizes = [math.prod(shape[:-1]), shape[-1]] if len(shape) else [1, 1]
        if self.hadamard:
            dim = self._summed_dim()
            sizes[dim] = (sizes[dim] + GROUP - 1) // GROUP * GROUP
        return sizes[0], sizes[1]

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the quantized data of a tensor of shape ``shape``.

        With a transform, the size along the transform is first rounded up to a multiple of 16. Packing then halves the
        size along the dim whose neighbours share a byte.

        Raises:
            ValueError: The size to halve is odd. Or the data is packed or padded along columns, and the tensor is not
                a matrix.
        """
        rows, columns = self._codes_matrix(shape)
        if self.packed != "none":
            size = columns if self.packed == "rows" else rows
            if isinstance(size, int) and size % 2:
                raise ValueError(
                    f"{self!r} stores two values of a {self.packed.removesuffix('s')} in one byte, but a tensor of "
                    f"shape {tuple(shape)} has {size}. Pad it to an even number, or use packed='none'."
                )
        if self.packed == "rows":
            columns = columns // 2
        if self.packed == "columns" or (self.hadamard and self._summed_dim() == 0):
            if self.packed == "none" and statically_true(rows == math.prod(shape[:-1])):
                return (*shape[:-1], columns)
            if len(shape) == 2:
                return (rows // 2 if self.packed == "columns" else rows), columns
            raise ValueError(
                f"{self!r} packs values along the columns of a matrix, but the tensor has shape {tuple(shape)}. "
                "Flatten its leading dims first."
            )
        return (*shape[:-1], columns) if len(shape) else ()

    def values_shape(self, codes_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor whose quantized data has shape ``codes_shape``, including the transform's padding."""
        if self.packed == "rows":
            return (*codes_shape[:-1], codes_shape[-1] * 2)
        if self.packed == "columns":
            return codes_shape[0] * 2, codes_shape[1]
        return tuple(codes_shape)

    def scale_dtype(self) -> torch.dtype:
        """uint8, because scales are e4m3 numbers stored as bytes."""
        return torch.uint8

    def scale_values(self, scale: Tensor) -> Tensor:
        """Decode e4m3 bytes to float32."""
        return E4M3.decode(scale)

    def transposed(self) -> TwoLevelScaling:
        """The quantizer of the transposed matrix: block and packing have rows and columns exchanged."""
        return self._laid(self.block[::-1], OTHER[self.packed])

    def unpacked(self) -> TwoLevelScaling:
        """The quantizer that stores the same values one per byte."""
        return self._laid(self.block, "none")

    def _laid(self, block: tuple[int, int], packed: str) -> TwoLevelScaling:
        if type(self) is not TwoLevelScaling:  # a subclass may have more fields
            return replace(self, block=block, packed=packed)
        # the constructor, because Dynamo of PyTorch 2.13 can't trace `replace` of a constant
        return TwoLevelScaling(self.format, block, packed, self.scale, self.rounding, self.seed, self.hadamard)

    def code_bits(self) -> int:
        """4, the number of bits per value."""
        return self.element_format().bits

    def for_shape(self, shape: Sequence[int]) -> TwoLevelScaling:
        """The quantizer itself, or `unpacked` if the size that packing would halve may be odd.

        ``shape`` is the shape of the tensor to quantize.
        """
        if self.packed == "none":
            return self
        sizes = self._codes_matrix(shape)
        return self if statically_true(sizes[PAIRS[self.packed]] % 2 == 0) else self.unpacked()

    def transform(self) -> tuple[int, ...]:
        """The signs of the random Hadamard transform; empty for no transform."""
        return self.hadamard

    def is_local(self) -> bool:
        """Whether quantizing a value depends only on the value and its block.

        False for stochastic rounding, whose noise depends on the position, and for a transform that mixes neighbours.
        """
        return self.rounding == "nearest" and not self.hadamard

    def has_kernels(self) -> bool:
        """Whether the Triton kernels support this scale rule; False for ``"reciprocal"``."""
        return self.scale != "reciprocal"

    def gemm_format(self) -> Float8Format | None:
        """None, because the values are not float8 numbers."""
        return None

    # ------------------------------------------------------------------ steps

    def _rule(self) -> TwoLevelRule:
        return TWO_LEVEL_RULES[self.scale]

    def _transformed(self, x: Tensor, dim: int = 0, every: slice = slice(None)) -> Tensor:
        """View ``x`` as a matrix, and transform it (to float32) if the quantizer has a transform.

        Only the rows (``dim`` 0) or columns (``dim`` 1) that ``every`` selects are computed.
        """
        matrix = as_matrix(x)
        if self.hadamard:
            return random_hadamard(matrix.float(), self._summed_dim(), self.hadamard, every=every)
        return matrix[every] if dim == 0 else matrix[:, every]

    def amax(self, x: Tensor) -> Tensor:
        """Compute the largest magnitude of each block, after the transform if there is one."""
        if not self.hadamard:
            return super().amax(x)
        return from_matrix(super().amax(self._transformed(x)), self.scale_shape(x.shape))

    def outer_scale(self, outer_amax: Tensor) -> Tensor:
        """Compute the global scale, (1,) float32, with the rule ``self.scale``.

        ``outer_amax`` is the amax of the full tensor, (1,) float32.
        """
        return self._rule().outer_scale(outer_amax)

    def block_scale(self, amax: Tensor, outer_amax: Tensor) -> Tensor:
        """Compute the block scales, as e4m3 bytes, with the rule ``self.scale``.

        ``amax`` has the blocks' amaxes; ``outer_amax`` is the amax of the full tensor, (1,) float32.
        """
        return self._rule().block_scale(amax, outer_amax)

    def block_multiplier(self, scale: Tensor, outer_scale: Tensor) -> Tensor:
        """Compute the multiplier (1 / scale) of each block from both scales, with the rule ``self.scale``."""
        return self._rule().multiplier(scale, outer_scale)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """Multiply values by ``multiplier`` in float32, then round once with ``self.rounding``, saturating.

        ``multiplier`` (1 / scale) has one entry per block. Returns the quantized values as uint8, packed according to
        ``self.packed``.
        """
        return self._cast(x, multiplier)

    def cast_at(self, x: Tensor, multiplier: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Cast part of a tensor, with noise determined by the positions of its elements in the full tensor.

        ``rows`` has the position of each row's first element, ``columns`` the offset of each column; int64.
        """
        return self._cast(x, multiplier, rows, columns)

    def _cast(self, x: Tensor, multiplier: Tensor, *where: Tensor) -> Tensor:
        if self.packed == "none":
            codes = self._codes(self._transformed(x), multiplier, self.block, *where)
        else:
            first, second = (self._every_other(x, multiplier, start, *where) for start in (0, 1))
            codes = first | (second << 4)
        return from_matrix(codes, self.codes_shape(x.shape))

    def _every_other(self, x: Tensor, multiplier: Tensor, start: int, *where: Tensor) -> Tensor:
        """Cast the first (``start`` 0) or second (``start`` 1) value of each pair that shares a byte.

        ``where`` are the arguments ``rows`` and ``columns`` of `noise`, or nothing. If all codes were computed first
        and then split, compiled code would store them all.
        """
        dim, every = PAIRS[self.packed], slice(start, None, 2)
        block = tuple(size // 2 if axis == dim else size for axis, size in enumerate(self.block))
        if self.rounding != "nearest":
            rows, columns = where or positions(self._codes_matrix(x.shape), x.device)
            where = (rows[every], columns) if dim == 0 else (rows, columns[every])
        return self._codes(self._transformed(x, dim, every), multiplier, block, *where)

    def _codes(self, matrix: Tensor, multiplier: Tensor, block: Sequence[int], *where: Tensor) -> Tensor:
        values = scaled(matrix, multiplier, (block[0], block[1]))
        if self.scale != "torchao":
            values = torch.where(matrix == 0, 0.0, values)  # TransformerEngine drops the sign of zeros
        return self._rounded(values, *where)

    def _rounded(self, values: Tensor, *where: Tensor) -> Tensor:
        fmt = self.element_format()
        if self.rounding == "nearest":
            return fmt.encode(values)
        return fmt.encode_stochastic(values, noise(values, self.seed, *where))

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiply quantized values by their block scales and undo the transform, exactly.

        The caller applies the global scale. Returns a tensor of ``dtype`` with shape ``values_shape(codes.shape)``.
        """
        shape = self.values_shape(codes.shape)
        matrix = as_matrix(codes)
        matrix = matrix if self.packed == "none" else unpack(matrix, PAIRS[self.packed])
        numbers = self.element_format().decode(matrix).to(dtype)
        # the product promotes the scales, see `Quantizer.dequantize`
        numbers = numbers * expand_blocks(self.scale_values(scale), matrix.shape, self.block)
        if self.hadamard:
            numbers = inverse_hadamard(numbers, self._summed_dim(), self.hadamard)
        return from_matrix(numbers, shape)
