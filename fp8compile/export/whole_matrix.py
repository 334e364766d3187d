"""Quantization of a sharded matrix: each rank quantizes its own shard by tiles, and sends codes.

    tile of whole blocks --amax, scale, cast--> codes and scales --> their place in the whole

A rank thus holds its shard, one whole matrix of codes with its scales, and one tile in float32. The result is bitwise
equal to quantizing the whole weight: a block is in one tile, or its amax is reduced over all tiles of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.export.fill_whole_tensor import fill, place_of
from fp8compile.formats import pack
from fp8compile.layout.cuts import DimSharding, Sharding
from fp8compile.layout.four_bit_packing import one_a_byte, packed_dim, packed_in_rows
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.nn.layer.shared_outer_amax import WHOLE_TENSOR
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer.quantize_over_ranks import (
    cast_part,
    has_one_scale,
    is_aligned,
    quantize_part,
    scales_of,
    whole_amax,
)
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer, transposed

__all__ = ["TILE", "WholeMatrix", "amax_of_all", "empty_matrix"]

TILE = 2**16  # elements of a tile, or one block: a quarter of a MiB in float32, a few of which are there at a time


def empty_matrix(quantizer: Quantizer, rows: int, columns: int, device: torch.device | str) -> Quantized:
    """Allocate the codes and scales of a (``rows``, ``columns``) matrix without initializing them."""
    quantizer = packed_in_rows(quantizer, (rows, columns))
    shape = (rows, columns)
    return Quantized(
        codes=torch.empty(quantizer.codes_shape(shape), dtype=torch.uint8, device=device),
        scale=torch.empty(quantizer.scale_shape(shape), dtype=quantizer.scale_dtype(), device=device),
        quantizer=quantizer,
        outer_scale=torch.empty(1, device=device) if quantizer.has_outer_scale() else None,
    )


# ---------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class _Interval:
    """Rows, or columns, of this rank's shard that are quantized at once.

    Attributes:
        place: Slice in the whole matrix.
        blocks: Slice of their blocks in the whole grid of scales.
        around: How many rows (or columns) of the first and of the last block are on other ranks.
    """

    place: slice
    blocks: slice
    around: tuple[int, int]


@dataclass(frozen=True)
class _Tile:
    """Part of this rank's shard that is quantized at once.

    Attributes:
        place: Slices in the whole matrix.
        blocks: Slices of its scales in the whole grid.
        part: The tile's elements; their layout says how many rows and columns of their blocks are on other ranks.
    """

    place: tuple[slice, slice]
    blocks: tuple[slice, slice]
    part: Plain


def _intervals(own: slice, total: int, block: int, count: int) -> Iterator[_Interval]:
    """Split a shard's rows, or columns, into intervals of at most ``count``.

    ``own`` is the shard's slice of the ``total`` rows; ``block`` rows share a scale (-1: all).
    """
    first = own.start
    while first < own.stop:
        stop = min(first // count * count + count, own.stop)
        if block == -1:
            yield _Interval(slice(first, stop), slice(0, 1), (0, 0))
        else:
            around = first % block, min(-stop % block, total - stop)
            yield _Interval(slice(first, stop), slice(first // block, -(-stop // block)), around)
        first = stop


def _tiles(part: Plain, block: tuple[int, int], dtype: torch.dtype | None) -> Iterator[_Tile]:
    """Yield a shard in tiles of whole blocks (cut off at its edges), cast to ``dtype`` unless it is None."""
    shape = part.whole_shape()
    own = place_of(part.cuts, shape)
    row_step, column_step = (math.lcm(max(size, 1), 2) for size in block)  # two neighbours may share a byte
    columns = min(max(column_step, own[1].stop - own[1].start), max(1, TILE // row_step // column_step) * column_step)
    rows = max(1, TILE // max(1, columns) // row_step) * row_step
    for vertical in _intervals(own[0], shape[0], block[0], rows):
        for horizontal in _intervals(own[1], shape[1], block[1], columns):
            sides = vertical, horizontal
            cuts = [
                DimSharding(None, 1, dim, (before, each.place.stop - each.place.start, after))
                for dim, each in enumerate(sides)
                for before, after in [each.around]
                if before or after
            ]
            local = part.local[
                tuple(
                    slice(each.place.start - at.start, each.place.stop - at.start)
                    for each, at in zip(sides, own, strict=True)
                )
            ]
            local = local if dtype is None else local.to(dtype)
            yield _Tile(
                place=(vertical.place, horizontal.place),
                blocks=(vertical.blocks, horizontal.blocks),
                part=Plain(local, TensorLayout(tuple(cuts))),
            )


def _whole_amax(part: Plain, quantizer: Quantizer, dtype: torch.dtype | None) -> Tensor:
    """Return the amax of each block of a sharded matrix, over all ranks, float32; ``part`` is this rank's shard.

    Values are cast to ``dtype`` first, unless it is None.
    """
    grid = part.local.new_zeros(quantizer.scale_shape(part.whole_shape()), dtype=torch.float32)
    for each in _tiles(part, quantizer.block, dtype):
        grid[each.blocks] = torch.maximum(grid[each.blocks], whole_amax(each.part, quantizer))
    for cut in part.cuts:
        grid = grid if cut is None else all_reduce_amax(grid, cut.group)
    return grid


def amax_of_all(part: Plain, dtype: torch.dtype | None) -> Tensor:
    """Return the amax of a whole sharded matrix over all ranks, (1,) float32; ``part`` is this rank's shard.

    Values are cast to ``dtype`` first, unless it is None.
    """
    return _whole_amax(part, WHOLE_TENSOR, dtype).view(1)


# ---------------------------------------------------------------------------------- the whole


def _has_whole_pairs(cuts: Sharding, dim: int, size: int) -> bool:
    """Whether codes packed in pairs along ``dim`` never share a byte across ranks; all ranks give the same answer."""
    own = [cut for cut in cuts if cut is not None and cut.dim == dim]
    is_known = all(cut.is_even() for cut in own[:-1])  # else ranks cut parts of different sizes, each its own way
    return is_known and size % 2 == 0 and all(length % 2 == 0 for cut in own for length in cut.sizes)


class WholeMatrix:
    """A whole matrix of codes on each rank, filled by shards that each rank quantizes and sends.

    Args:
        quantizer: Quantizer of the matrix as the model's module stores it.
        shape: Rows and columns of the whole matrix as the module stores it.
        cuts: How the matrix is sharded, as the module stores it.
        device: Device on which the matrix is allocated.
        is_turned: Whether the module stores (in_features, out_features), the transpose of the filled matrix.
    """

    def __init__(
        self, quantizer: Quantizer, shape: Sequence[int], cuts: Sharding, device: torch.device, *, is_turned: bool
    ) -> None:
        own = transposed(quantizer) if is_turned else quantizer
        rows, columns = reversed(shape) if is_turned else shape
        if not _has_whole_pairs(cuts, 0 if is_turned else 1, columns):
            own = own.unpacked() or own
        self.matrix: Quantized = empty_matrix(own, rows, columns, device)
        self._shape, self._cuts, self._block = tuple(shape), cuts, quantizer.block
        self._pairs: int | None = packed_dim(self.matrix.quantizer)  # the dim along which two codes share a byte
        if self._pairs is not None and is_turned:
            self._pairs = -2
        self._units = tuple(2 if dim == self._pairs else 1 for dim in (-2, -1))
        as_it_lies = self.matrix.t() if is_turned else self.matrix
        self._codes, self._scale = as_it_lies.codes, as_it_lies.scale
        self._knows_scales = [False, False]  # whether this rank has all scales along rows, along columns

    def _put_codes(self, place: tuple[slice, slice], codes: Tensor) -> None:
        """Write codes, one per byte, at the slices ``place`` of the whole matrix, which may be packed."""
        codes = codes if self._pairs is None else pack(codes, self._pairs)
        units = zip(place, self._units, strict=True)
        self._codes[tuple(slice(own.start // unit, -(-own.stop // unit)) for own, unit in units)] = codes

    def quantize(
        self,
        part: Plain,
        quantizer: Quantizer,
        dtype: torch.dtype | None,
        *,
        outer_amax: Tensor | None = None,
        multiplier: Tensor | None = None,
    ) -> None:
        """Quantize this rank's shard into the whole matrix. Collective call of all ranks with a shard.

        Args:
            part: Values of the shard.
            quantizer: Quantizer of the matrix as the model's module stores it. Codes must depend only on values and
                blocks, not on positions.
            dtype: Dtype to which values are cast first; None for their own.
            outer_amax: Amax for the one scale of the matrix, (1,) float32, if other matrices share the scale.
            multiplier: 1 / scale, by which values are multiplied before rounding, (1, 1) float32; None to compute it.
        """
        quantizer, outer_scale = quantizer.unpacked() or quantizer, None
        if multiplier is None and outer_amax is None and has_one_scale(quantizer):
            outer_amax = amax_of_all(part, dtype)
        if quantizer.has_outer_scale():
            none = torch.zeros(1, 1, device=part.local.device)
            *_, outer_scale = scales_of(none, quantizer, PYTHON_OF_STEPS, outer_amax=outer_amax)
        if multiplier is not None:
            known: Any = multiplier, quantizer.scale_of(multiplier)
        elif outer_amax is not None and quantizer.block == (-1, -1):
            known = scales_of(outer_amax.view(1, 1), quantizer, PYTHON_OF_STEPS)
        elif quantizer.block[0] == -1 or not is_aligned(part, quantizer):
            grid = _whole_amax(part, quantizer, dtype)
            known = scales_of(grid, quantizer, PYTHON_OF_STEPS, outer_amax=outer_amax)
        else:
            known = None
        if outer_scale is not None and self.matrix.outer_scale is not None:
            self.matrix.outer_scale.copy_(outer_scale)
        if known is not None:
            self._scale.copy_(known[1])
            self._knows_scales = [True, True]
        for tile in _tiles(part, quantizer.block, dtype):
            if known is not None:
                codes = cast_part(tile.part, known[0][tile.blocks], quantizer, PYTHON_OF_STEPS)
            else:  # no rank has elements of these blocks
                own = quantize_part(Plain(tile.part.local), quantizer, PYTHON_OF_STEPS, outer_amax=outer_amax)
                codes, self._scale[tile.blocks] = own.codes, own.scale
            self._put_codes(tile.place, codes)

    def copy(self, shard: Quantized) -> None:
        """Write this rank's shard of codes and scales into the whole matrix."""
        rows, columns = place_of(shard.cuts, self._shape)
        step = max(1, TILE // max(1, shard.shape[1]) // 2) * 2
        per_byte = 2 if packed_dim(shard.quantizer) == -2 else 1
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            own = shard.codes[(first - rows.start) // per_byte : -(-(stop - rows.start) // per_byte)]
            self._put_codes((slice(first, stop), columns), one_a_byte(own, shard.quantizer)[0])
        self._knows_scales = list(shard.has_scales_of_whole)
        place = place_of(shard.cuts, self._shape, self._block)
        place = tuple(slice(None) if known else own for known, own in zip(self._knows_scales, place, strict=True))
        self._scale[place] = shard.scale
        if self.matrix.outer_scale is not None and shard.outer_scale is not None:
            self.matrix.outer_scale.copy_(shard.outer_scale)

    def filled(self) -> Quantized:
        """Exchange shards, and return the complete matrix. Collective call of all ranks with a shard."""
        fill(self._codes, self._cuts, self._shape, self._units)
        fill(self._scale, self._cuts, self._shape, self._block, self._knows_scales)
        return self.matrix
