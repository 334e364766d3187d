"""Operands whose products are exact until the final rounding, so that all correct GEMMs return equal bits.

Codes are whole numbers from -2 to 2 (or 6, in groups of four-bit codes) and scales are powers of two. So all addends
are multiples of one unit, and every partial sum takes at most `SUM_BITS` bits in that unit. This is exact on every
GPU, also with fast accumulation: tensor cores keep at least 14 bits of a partial sum, 13 of them after the leading bit
(compute capability 8.9 and 9.0; DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.formats import E4M3
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.groups.group_quantize_two_levels import group_quantize_two_levels
from fp8compile.ops.groups.padding import alignment, padded_length, spans
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.blocks import expand_blocks
from fp8compile.quantizers.two_level_rules import LARGEST

__all__ = ["SIZES", "SUM_BITS", "Exact", "matrix", "offsets", "on", "rows_of_groups", "stack", "tokens_of_groups"]

SUM_BITS = 13
M, N, K = 80, 96, 256  # sizes of a product: multiples of 16, as every GEMM takes them, and two blocks of 128
SIZES = (M, N, K)
GROUP_SIZES, TAIL = (45, 0, 83), 6  # rows of each group, and rows after the last group
LARGEST_CODE = 6.0  # of e2m1; the amax of a block that has it decides the block's scale


def offsets() -> Tensor:
    """Return the ends of three groups, (3,) int32; the second group is empty, and some rows follow the last group."""
    return torch.tensor(GROUP_SIZES, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class Exact:
    """A quantized operand on the CPU, with its exact values.

    Attributes:
        operand: Codes and scales.
        values: Codes times scales, float64, exact: (rows, K) for a matrix, (E, N, K) for stacked matrices, (tokens,
            features) for tokens of groups.
    """

    operand: Quantized
    values: Tensor


def _whole_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _exponents(shape: tuple[int, ...], summed: int) -> Tensor:
    """Return exponents: 0 or 1 along dim ``summed``, which the product sums, plus -1, 0 or 1 along the other dim."""
    rows, columns = shape
    periods, first = ((2, 3), (0, -1)) if summed == 0 else ((3, 2), (-1, 0))
    down, along = (torch.arange(size) % period + at for size, period, at in zip(shape, periods, first, strict=True))
    return down.view(rows, 1) + along.view(1, columns)


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def _outer(quantizer: Quantizer, exponent: int) -> Tensor | None:
    return _powers(torch.tensor([exponent])) if quantizer.has_outer_scale() else None


def _stored(quantizer: Quantizer, scales: Tensor) -> Tensor:
    """Convert scales that are powers of two to the form in which the quantizer stores them."""
    return E4M3.encode(scales) if quantizer.has_outer_scale() else quantizer.scale_of(1 / scales)


def matrix(quantizer: Quantizer, rows: int, seed: int, *, summed: int = 1) -> Exact:
    """Return a random quantized matrix: (rows, K) if the product sums over dim 1, (K, rows) if ``summed`` is 0."""
    shape = (rows, K) if summed == 1 else (K, rows)
    scales = _powers(_exponents(quantizer.scale_shape(shape), summed))
    outer = _outer(quantizer, seed % 3)
    whole = scales if outer is None else scales * outer
    numbers = _whole_numbers(seed, *shape)
    values = numbers * expand_blocks(whole, shape, quantizer.block)
    operand = Quantized(
        codes=quantizer.cast(values, 1 / whole), scale=_stored(quantizer, scales), quantizer=quantizer,
        outer_scale=outer,
    )  # fmt: skip
    return Exact(operand, values.double())


def stack(quantizer: Quantizer, seed: int) -> Exact:
    """Return a random stack (E, N, K), one matrix for each group, each quantized by ``quantizer``."""
    parts = [matrix(quantizer, N, seed + group) for group in range(len(GROUP_SIZES))]
    outer = [part.operand.outer_scale for part in parts if part.operand.outer_scale is not None]
    operand = Quantized(
        codes=torch.stack([part.operand.codes for part in parts]),
        scale=torch.stack([part.operand.scale for part in parts]),
        quantizer=quantizer,
        outer_scale=torch.cat(outer) if outer else None,
    )
    return Exact(operand, torch.stack([part.values for part in parts]))


def rows_of_groups(quantizer: Quantizer, seed: int) -> Exact:
    """Return random rows (R, K) of all groups, and some after the last group, quantized along rows."""
    ends, rows = offsets(), sum(GROUP_SIZES) + TAIL
    if isinstance(quantizer, TwoLevelScaling):
        x = _with_largest(_whole_numbers(seed, rows, K).t()).t()
        return _two_levels(x, quantizer, ends, along_rows=True)
    is_one_block = quantizer.block[0] == -1
    grid = (rows, quantizer.scale_shape((1, K))[1])
    exponents = torch.ones(grid, dtype=torch.int64) if is_one_block else _exponents(grid, 1)
    for group, (own, _) in enumerate(spans(ends, 1)):
        exponents[own] += group if is_one_block else 0
    scales = _powers(exponents)
    values = _whole_numbers(seed, rows, K) * expand_blocks(scales, (rows, K), (1, quantizer.block[1]))
    multiplier, line = 1 / scales, _with_block(quantizer, (1, quantizer.block[1]))
    operand = Quantized(codes=line.cast(values, multiplier), scale=_stored(quantizer, scales), quantizer=quantizer)
    return Exact(operand, values.double())


def tokens_of_groups(quantizer: Quantizer, features: int, seed: int) -> Exact:
    """Return random tokens (R, features) of all groups, and some after the last group, quantized along tokens.

    The codes are transposed.
    """
    ends, rows = offsets(), sum(GROUP_SIZES) + TAIL
    x = _whole_numbers(seed, rows, features)
    if isinstance(quantizer, TwoLevelScaling):
        for own, _ in spans(ends, 1):
            x[own] = _with_largest(x[own])
        return _two_levels(x, quantizer, ends, along_rows=False)
    align, is_one_block = alignment(quantizer), quantizer.block[0] == -1
    columns, block = padded_length(rows, len(GROUP_SIZES), align), quantizer.block[0]
    codes = torch.zeros(features, columns, dtype=torch.uint8)
    blocks = len(GROUP_SIZES) if is_one_block else columns // block
    scale = _stored(quantizer, torch.ones(blocks, *quantizer.scale_shape((1, features))[1:]))
    values = torch.zeros(rows, features)
    for group, (own, place) in enumerate(spans(ends, align)):
        shape = (own.stop - own.start, features)
        if not shape[0]:
            continue
        scales = _powers(_exponents(quantizer.scale_shape(shape), 0) + group)
        values[own] = x[own] * expand_blocks(scales, shape, quantizer.block)
        codes[:, place] = quantizer.cast(values[own], 1 / scales).t()
        first = group if is_one_block else place.start // block
        scale[first : first + scales.shape[0]] = _stored(quantizer, scales)
    return Exact(Quantized(codes=codes, scale=scale, quantizer=quantizer), values.double())


# ---------------------------------------------------------------------------------- two levels


def _with_block(quantizer: Quantizer, block: tuple[int, int]) -> Quantizer:
    return type(quantizer)(format=quantizer.format, block=block)


def _with_largest(x: Tensor) -> Tensor:
    """Put 6, the largest four-bit number, into each block of 16 along dim 0, so that the block's amax is known."""
    x = x.clone()
    x[::16] = LARGEST_CODE
    return x


def _two_levels(x: Tensor, quantizer: TwoLevelScaling, ends: Tensor, *, along_rows: bool) -> Exact:
    """Scale each group of ``x``, (R, features), by a power of two, and quantize it along rows or along tokens.

    Blocks of ``x`` have amax 6, so each outer scale is a power of two, and the codes are exact.
    """
    exponents = torch.arange(len(GROUP_SIZES)) - 1
    values = x.clone()
    for group, (own, _) in enumerate(spans(ends, 1)):
        values[own] *= 2.0 ** int(exponents[group])
    amaxes = (LARGEST * _powers(exponents)).expand(2, -1).contiguous()
    directions = "rows" if along_rows else "tokens"
    codes, scale, outer, *tokens = group_quantize_two_levels(values, ends, amaxes, quantizer, quantizer, directions)
    if not along_rows:
        codes, scale, outer = tokens
    operand = Quantized(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer)
    return Exact(operand, values.double())


def on(operand: Quantized, device: torch.device) -> Quantized:
    """Return the operand with its codes and scales moved to a device."""
    move: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(device)  # noqa: E731
    return operand.each(move)
