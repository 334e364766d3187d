"""The elements of an operand (values, codes and scales), which statistics of a cast are computed from.

    operand                      values, codes, scales                      partial counts ("pieces")
    a matrix                     (M, K)                                     (1, rows or blocks)
    a stack                      (E, N, K)                                  (E, rows)
    groups, blocks along rows    (R, K), each row belongs to a group        (rows,)
    groups, blocks along tokens  (C, K), C padded tokens of K features      (rows,)

If two codes share a byte, elements at even and at odd positions are two tensors ("lanes"); the counts of both are
added before they are reduced. Partial counts are per row, or per block of a row, in the order of the cast, so that
Inductor fuses counting and casting into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import guard_or_false
from fp8compile.formats import Float4Format, Float8Format, lanes_of, unpack
from fp8compile.layout.cuts import SIDES
from fp8compile.layout.four_bit_packing import one_a_byte, packed_dim
from fp8compile.layout.quantized import Plain, Quantized, as_operand
from fp8compile.ops.groups.four_bit_tiles import scales_of_tokens, tile_ends
from fp8compile.ops.groups.padding import (
    alignment,
    group_of_rows,
    group_to_read,
    padded_offsets,
    row_of_columns,
    sizes_of_groups,
)
from fp8compile.ops.layer.quantize_groups import as_values_of_rows
from fp8compile.ops.layer.quantize_over_ranks import expanded_scales
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.quantizers.hadamard import random_hadamard
from fp8compile.scale_layouts import untiled

__all__ = [
    "Elements",
    "elements_of",
    "elements_of_codes",
    "numbers_of",
    "numel_of_groups",
    "pieces_of",
]


@dataclass(frozen=True)
class Elements:
    """The elements of an operand on this rank: values, quantized values and scales in a common shape.

    Attributes:
        values: The values that were cast, float32, after the quantizer's transform if it has one.
        codes: The quantized values, one per byte.
        scale: The scale of each element, float32: that of its block, times the global scale if there is one. It
            broadcasts against ``values``.
        format: Format of the quantized values.
        batch: Number of leading dims over which matrices are stacked.
        group: The group of each row; the number of groups for a row after the last group. None without groups.
        numel: Number of elements of each matrix without padding; with groups, (E,) float64.
        has_values: Whether the values before the cast are available. If not, because a weight is an FP8 parameter,
            ``values`` are the dequantized values.
        lanes: If two values share a byte, the same elements in two halves: those first in a byte, then those second.
            Statistics are then computed on the lanes.
    """

    values: Tensor
    codes: Tensor
    scale: Tensor
    format: Float8Format | Float4Format
    batch: int
    group: Tensor | None
    numel: Tensor | int
    has_values: bool = True
    lanes: tuple[Elements, ...] = ()

    def once(self, compute: Callable[[Elements], Tensor]) -> Tensor:
        """Return ``compute(self)``, cached because several statistics need it."""
        known: dict[Any, Tensor] = self.__dict__.setdefault("_known", {})
        if compute not in known:
            known[compute] = compute(self)
        return known[compute]

    def decoded(self) -> Tensor:
        """Return the quantized values decoded to float32, before they are multiplied by scales."""
        return self.once(_decoded)

    def magnitude(self) -> Tensor:
        """Return the magnitudes of ``values``, computed once."""
        return self.once(_magnitude)

    def dequantized(self) -> Tensor:
        """Return the values that the GEMM multiplies: quantized values times scales, float32."""
        return self.decoded() * self.scale


def _decoded(elements: Elements) -> Tensor:
    return elements.format.decode(elements.codes)


def _magnitude(elements: Elements) -> Tensor:
    return elements.values.abs()


def elements_of(
    part: Plain, found: Quantized, shape: Sequence[int], *, along_tokens: bool, by_rows: bool = False
) -> Elements:
    """Bring the values, codes and scales of an operand to one common shape.

    Args:
        part: The values on this rank.
        found: Codes of the values, before ranks gather codes.
        shape: Shape of the values, without rows that only pad a stacked matrix to whole blocks.
        along_tokens: Whether codes of groups lie along tokens.
        by_rows: Whether the casting kernel traverses whole rows, whatever the blocks.
    """
    if part.layout.offs is not None:
        return _of_groups(part, found, along_tokens=along_tokens)
    values = part.local if part.layout.batch else as_matrix(part.local)
    n = -1 if by_rows else _run(found.quantizer, along_tokens=along_tokens)
    return _of_matrices(values, found, shape[-2] if part.layout.batch else None, n)


def elements_of_codes(found: Quantized) -> Elements:
    """Make the `Elements` of a weight that is kept as codes, whose original values are not known."""
    return _of_matrices(None, found, None, _run(found.quantizer, along_tokens=False))


def _of_matrices(values: Tensor | None, found: Quantized, rows: int | None, n: int) -> Elements:
    batch, (operand, *windows) = found.layout.batch, as_operand(found)
    scale = operand.scale if batch or operand.scale.ndim != 1 else operand.grid()
    codes, quantizer = one_a_byte(operand.codes if batch else as_matrix(operand.codes), operand.quantizer)
    scale_grid, scales = quantizer.scale_values(scale), expanded_scales(codes, scale, quantizer)
    if (outer := operand.outer_scale) is not None:
        scales = scales * (outer.view(-1, 1, 1) if batch else outer)
    for dim, window in zip(SIDES, windows, strict=True):
        if window is not None:  # what is before this rank's elements belongs to other ranks
            codes, scales = window.extract(codes, dim), window.extract(scales.expand(codes.shape), dim)
    fmt, has_values = quantizer.element_format(), values is not None
    if values is None:
        values = fmt.decode(codes) * scales
    elif quantizer.transform():  # fills the last sixteen
        values = _transformed(values.float(), quantizer)
    elif rows is not None:
        scales = scales.expand(codes.shape)
        values, codes, scales = (each[:, :rows] for each in (values, codes, scales))
    numel = values.shape[batch:].numel()
    if not batch and n > 1 and guard_or_false(values.shape[1] % n == 0) and guard_or_false(numel > 0):
        # a block a row, as the cast reads it: PyTorch 2.13 fuses no two nodes if one reads a buffer in two forms
        of_block = quantizer.block == (1, n) and not any(windows)
        scales = scale_grid.reshape(-1, 1) if of_block else scales.expand(codes.shape).reshape(-1, n)
        values, codes = values.reshape(-1, n), codes.reshape(-1, n)
    lanes: tuple[Elements, ...] = ()
    if (packed := packed_dim(operand.quantizer)) is not None and not batch and n == -1 and not any(windows):
        parts = zip((0, 1), lanes_of(operand.codes), strict=True)
        lanes = tuple(_lane(values, scales, packed, place, own, fmt) for place, own in parts)
    return Elements(values.float(), codes, scales, fmt, batch, None, numel, has_values, lanes)


def _lane(
    values: Tensor, scales: Tensor, dim: int, place: int, codes: Tensor, fmt: Float8Format | Float4Format
) -> Elements:
    """Return the elements at every second position along ``dim``, from position ``place`` (0 or 1) on.

    ``codes`` are the codes at these positions; ``values`` and ``scales`` are for all positions.
    """
    own, factors = (
        each.movedim(dim, -1)[..., place::2].movedim(-1, dim) for each in (values, scales.expand(values.shape))
    )
    return Elements(own.float(), codes, factors, fmt, 0, None, own.numel())


def _run(quantizer: Quantizer, *, along_tokens: bool) -> int:
    """Return how many neighbours of a row are counted together: a block's length, or -1 for a whole row.

    Blocks are counted one by one only if one kernel computes their amaxes and codes.
    """
    rows, columns = quantizer.block
    if quantizer.has_outer_scale() or (columns == 1 and not along_tokens) or rows == columns:
        return -1
    return rows if columns == 1 else columns


def _transformed(values: Tensor, quantizer: Quantizer) -> Tensor:
    if not (signs := quantizer.transform()):
        return values
    dim = 0 if quantizer.block[1] == 1 else 1
    if values.ndim == 2:
        return random_hadamard(values, dim, signs)
    stack = values.transpose(-2, -1) if dim == 0 else values  # along rows no group has elements of two matrices
    found = random_hadamard(stack.flatten(0, 1), 1, signs).view(*stack.shape[:2], -1)
    return found.transpose(-2, -1) if dim == 0 else found


def _of_groups(part: Plain, found: Quantized, *, along_tokens: bool) -> Elements:
    ends: Any = part.layout.offs  # the caller has asked
    x, groups = part.local, ends.shape[0]
    numel = numel_of_groups(ends, found.quantizer, x.shape[1])
    if not along_tokens:
        operand, _, window = as_operand(as_values_of_rows(found, x.shape[1]))
        values = x if window is None else window.embed(x, SIDES[1])
        scale = expanded_scales(operand.codes, operand.scale, operand.quantizer)
        if operand.outer_scale is not None:
            scale = scale * operand.outer_scale[group_to_read(ends, x.shape[0])].unsqueeze(1)
        group, codes, quantizer = group_of_rows(ends, x.shape[0]), operand.codes, operand.quantizer
        values = torch.where((group < groups).unsqueeze(1), values, 0)  # rows behind the groups may hold anything
    else:
        is_tiled = packed_dim(found.quantizer) is not None  # in tiles of 128 tokens
        quantizer = (found.quantizer.unpacked() if is_tiled else None) or found.quantizer
        codes, rows = (unpack(found.codes, -1) if is_tiled else found.codes).t(), quantizer.block[0]
        columns = tile_ends(ends) if is_tiled else padded_offsets(ends, alignment(quantizer))
        row, group = row_of_columns(ends, alignment(quantizer), codes.shape[0], columns)
        values = torch.where((row >= 0).unsqueeze(1), pad(x, (0, 0, 0, 1))[row], 0)
        place = group if rows == -1 else torch.arange(codes.shape[0], device=codes.device) // rows
        grid = (
            scales_of_tokens(found.scale, ends, codes.shape)
            if is_tiled
            else _grid_along_tokens(found, rows, codes.shape)
        )
        scale = quantizer.scale_values(grid)[place]
        if found.outer_scale is not None:
            scale = scale * found.outer_scale[group].unsqueeze(1)
        if quantizer.transform():
            start = torch.cat((ends.new_zeros(1), columns))[group]
            padded = sizes_of_groups(padded_offsets(ends, alignment(quantizer)))[group]
            group = torch.where(torch.arange(codes.shape[0], device=ends.device) - start < padded, group, groups)
        else:
            group = torch.where(row >= 0, group, groups)
    values = _transformed(values.float(), quantizer)
    return Elements(values, codes, scale, quantizer.element_format(), 0, group, numel)


def numel_of_groups(ends: Tensor, quantizer: Quantizer, features: int) -> Tensor:
    """Return the number of elements cast in each of E groups of rows with ``features`` columns, (E,) float64.

    ``ends`` are the ends of the groups. A transform along tokens pads a group's tokens to a multiple of 16.
    """
    if quantizer.transform() and quantizer.block[1] == 1:
        ends = padded_offsets(ends, alignment(quantizer))
    return sizes_of_groups(ends).double() * features


def _grid_along_tokens(found: Quantized, rows: int, shape: torch.Size) -> Tensor:
    """Return the scales of blocks of tokens, (blocks, features), or of whole groups, (E, features or 1).

    ``rows`` is the number of tokens in a block, -1 for a group; ``shape`` is (tokens, features).
    """
    if rows == -1 or found.scale.ndim == 2:
        return found.scale
    return untiled(found.scale, shape[1], shape[0] // rows).t()


# ---------------------------------------------------------------------------------- pieces


def numbers_of(elements: Elements, compute: Callable[[Elements], Tensor], combine: str) -> Tensor:
    """Apply ``compute`` to each element; for packed codes, combine the numbers of a byte's two codes.

    ``combine`` is ``"sum"`` or ``"max"``.
    """
    if not elements.lanes:
        return compute(elements)
    first, second = (compute(lane) for lane in elements.lanes)
    if combine == "max":
        return torch.maximum(first, second)
    return first.int() + second.int() if first.dtype == torch.bool else first + second


def pieces_of(elements: Elements, numbers: Tensor, combine: str) -> Tensor:
    """Reduce a number of each element to one number for each row or block, in the order of the cast.

    Args:
        elements: The elements.
        numbers: The result of `numbers_of`: bool or int32 to be counted, float32 or float64.
        combine: ``"sum"`` or ``"max"``.

    Returns:
        Partial results, (E, pieces) for E matrices, with E = 1 for a matrix; (rows,) with groups.
    """
    if elements.group is not None:
        return _reduced(numbers, combine)
    matrices = elements.values.shape[0] if elements.batch else 1
    if guard_or_false(elements.values.numel() == 0):
        return elements.values.new_empty((matrices, 0), dtype=torch.float32)
    return _reduced(numbers, combine).reshape(matrices, -1)


def _reduced(values: Tensor, combine: str) -> Tensor:
    if combine == "max":
        return values.amax(-1)
    if values.dtype == torch.float64:
        return values.sum(-1)
    if values.dtype not in (torch.bool, torch.int32):
        return values.sum(-1, dtype=torch.float32)
    size = values.shape[-1]
    fits = values.dtype == torch.bool and isinstance(size, int) and size < 256
    return values.sum(-1, dtype=torch.uint8 if fits else torch.int32)
