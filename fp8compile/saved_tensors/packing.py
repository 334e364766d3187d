"""Conversion of a saved tensor to codes and back, used by graphs and eager mode.

x --amax, scale, cast--> codes, scales --saved--> codes times scales, rounded once to the dtype of x
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fp8compile._compat import any_is_zero, statically_true
from fp8compile.formats import Float8Format
from fp8compile.layout.quantized import Plain
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS, Steps
from fp8compile.ops.traced_steps import OPS_OF_STEPS
from fp8compile.quantizers import CurrentScaling, Quantizer, with_block
from fp8compile.quantizers.blocks import as_matrix, expand_blocks, from_matrix
from fp8compile.target import target_of

__all__ = ["OPS_OF_STEPS", "PYTHON_OF_STEPS", "Packing"]

MOST_ROWS = 16  # of a block that lies in a column: a graph has some nodes for each


@dataclass(frozen=True)
class Packing:
    """How one saved tensor is converted to codes and back.

    Attributes:
        quantizer: Quantizes the tensor; specialized by ``for_shape``.
        order: Order of the tensor's dims in memory, outermost first. The tensor is quantized in this order, so that
            the dequantized tensor gets the same strides.
        dtype: Dtype of the tensor.
    """

    quantizer: Quantizer
    order: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor, quantizer: Quantizer) -> Packing | None:
        """Return how ``quantizer`` packs ``x``; None if ``x`` has gaps or overlaps, no dims or no elements."""
        order = _memory_order(x)
        if order is None or x.ndim == 0 or any_is_zero(x.shape):
            return None
        return Packing(quantizer.for_shape([x.shape[dim] for dim in order]), order, x.dtype)

    def pack(self, x: Tensor, steps: Steps = OPS_OF_STEPS) -> tuple[Tensor, ...]:
        """Quantize the tensor; returns codes, scales and the outer scale, if any.

        Scales that are powers of two are stored in bfloat16, without rounding. ``steps`` runs amax, scale and cast, as
        operators or in Python.
        """
        ordered = x.permute(self.order)
        if self._takes_rows_one_by_one(ordered):
            return self._packed_by_rows(ordered, steps)
        found = quantize_part(Plain(ordered), self.quantizer, steps)
        if _is_exact(self.quantizer):
            return found.codes, found.scale_values().to(torch.bfloat16)
        return found.parts()

    def _takes_rows_one_by_one(self, x: Tensor) -> bool:
        """Whether `_packed_by_rows` can pack ``x``: blocks are a few rows by one column, scales are powers of two."""
        rows, columns = self.quantizer.block
        is_column = columns == 1 and 1 < rows <= MOST_ROWS and _is_exact(self.quantizer)
        return is_column and statically_true(math.prod(x.shape[:-1]) % rows == 0)

    def _packed_by_rows(self, x: Tensor, steps: Steps) -> tuple[Tensor, ...]:
        """Pack as `pack` does, with operators that read the rows of a block one after the other.

        Recipes that transform groups of tokens read them in the same way, so Inductor packs in the same kernel.
        """
        one_by_one = with_block(self.quantizer, (1, 1))
        rows = x.reshape(-1, self.quantizer.block[0], x.shape[-1]).unbind(1)
        amax = reduce(torch.maximum, (row.abs() for row in rows)).float()
        multiplier, scale = steps.scale(amax, one_by_one)
        codes = torch.stack([steps.cast(row, multiplier, one_by_one) for row in rows], 1)
        values = one_by_one.scale_values(scale)
        return codes.view(x.shape), values.to(torch.bfloat16)

    def unpack(self, parts: Sequence[Tensor]) -> Tensor:
        """Dequantize codes and scales that `pack` returned; rounds once to ``dtype``.

        If scales are powers of two, the product needs no rounding and is one operator; Inductor can repeat this
        operator in each kernel that reads the values.
        """
        codes, scale, *outer = parts
        if _is_exact(self.quantizer):
            wide = torch.float32 if self.dtype is torch.float16 else self.dtype  # float16 has not all of the scales
            numbers = codes.view(self.quantizer.element_format().dtype)  # type: ignore[union-attr]  # of float8
            values = _times(numbers.to(wide), scale.to(wide), self.quantizer.block).to(self.dtype)
        else:
            values = dequantize(codes, scale, self.quantizer, self.dtype, *outer)
        return values.permute([self.order.index(dim) for dim in range(len(self.order))])


def _is_exact(quantizer: Quantizer) -> bool:
    """Whether all scales are powers of two, so that code times scale is exact in bfloat16."""
    return (
        type(quantizer) is CurrentScaling
        and quantizer.scale != "fp32"
        and isinstance(quantizer.element_format(), Float8Format)
    )


def _times(numbers: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = block
    if columns == 1 and statically_true(math.prod(numbers.shape[:-1]) % rows == 0):
        groups = numbers.reshape(-1, rows, numbers.shape[-1])
        return (groups * scale.view(-1, 1, scale.shape[-1])).view(numbers.shape)
    if rows == 1 and columns == -1:
        return numbers * scale
    size = numbers.shape[-1]
    # Inductor's C++ backend can't split a loop at the end of a block, see `quantizers.blocks`
    if rows == 1 and statically_true(size % columns == 0) and target_of(numbers.device).type != "cpu":
        return (numbers.unflatten(-1, (-1, columns)) * scale.unsqueeze(-1)).flatten(-2)
    values = as_matrix(numbers) * expand_blocks(scale, numbers.shape, block)
    return from_matrix(values, numbers.shape)


def _memory_order(x: Tensor) -> tuple[int, ...] | None:
    """Order of dims in which a tensor is contiguous in memory; None if it has gaps or overlaps."""
    strides = list(x.stride())
    orders = [tuple(range(x.ndim))]
    if all(isinstance(stride, int) for stride in strides):
        orders.append(tuple(sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))))
    orders += [(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2), (0, 2, 1, 3)] if x.ndim > 1 else []
    return next((order for order in orders if len(order) == x.ndim and _is_dense(x, order)), None)


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    expected = 1
    for dim in reversed(order):
        size = x.shape[dim]
        if not (statically_true(size == 1) or statically_true(x.stride(dim) == expected)):
            return False
        expected = expected * size
    return True
