"""Blackwell's grouped MX GEMM: `torch._scaled_grouped_mm` with E8M0 scales of 32 values along k.

Scales are in tiles of 128 rows by 4 blocks (`fp8compile.scale_layouts`). Each group begins a new tile, so its scales
are padded, along another dim in each of a `GroupedGemm`'s two products:

    rows    each row times its group's matrix: the left operand's scales of a group begin at a multiple of 128 rows
    outer   sums over each group's tokens: both operands' scales of a group begin at a multiple of 4 blocks of 32
            tokens, and its tiles are contiguous

Source: PyTorch's checks in `_scaled_grouped_mm` (aten/src/ATen/native/cuda/GroupedBlas.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.grouped.torch_scaled_grouped_mm import lacks_grouped, scaled_outer, scaled_rows
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.mx import MX_BLOCK, takes_mx
from fp8compile.ops.groups.padding import alignment, padded_length, padded_offsets, row_of_columns
from fp8compile.quantizers import GemmConfig
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS, for_each_row, swizzled, tiled

__all__ = ["MX"]


def _lacks(problem: GemmProblem) -> str | None:
    return lacks_grouped("mx groups", problem)


def row_scales(scale: Tensor, offsets: Tensor) -> Tensor:
    """Put scales of R rows in groups, (R, blocks), into 128 x 4 tiles; each group begins a new tile.

    ``offsets`` are the ends of the groups.
    """
    columns = padded_length(scale.shape[0], offsets.shape[0], TILE_ROWS)
    row, _ = row_of_columns(offsets, TILE_ROWS, columns)
    spread = torch.where((row >= 0).unsqueeze(1), scale[row.clamp(min=0)], 0)
    return swizzled(spread).view(columns, -1)


def matrix_scales(matrices: Quantized) -> Tensor:
    """Put scales of stacked matrices into 128 x 4 tiles; the scale of a 32 x 32 block is repeated for its rows."""
    scale = for_each_row(matrices.scale, matrices.quantizer.block[0], matrices.codes.shape[1])
    return tiled(scale).flatten(1).view(torch.float8_e8m0fnu)


def token_scales(scale: Tensor, ends: Tensor) -> Tensor:
    """Put scales along tokens, (C / 32, features), into 128 x 4 tiles; each group begins a new tile.

    C is the number of columns of the transposed codes, and ``ends`` are the ends of the groups among these columns.
    """
    blocks = ends // MX_BLOCK
    features = -(-scale.shape[1] // TILE_ROWS)  # tiles down the features
    count = padded_length(scale.shape[0], ends.shape[0], TILE_BLOCKS)
    source, _ = row_of_columns(blocks, TILE_BLOCKS, count)
    spread = torch.where((source >= 0).unsqueeze(1), scale[source.clamp(min=0)], 0)  # groups begin with a tile
    tiles = tiled(spread.t()).flatten(2)  # (tiles of features, tiles of blocks, bytes)
    tile_ends = padded_offsets(blocks, TILE_BLOCKS) // TILE_BLOCKS
    first = torch.cat((tile_ends.new_zeros(1), tile_ends))
    place = torch.arange(tiles.shape[0] * tiles.shape[1], device=ends.device)
    which = torch.searchsorted(tile_ends * features, place, right=True).clamp(max=ends.shape[0] - 1)
    wide = (first[which + 1] - first[which]).clamp(min=1)
    inner = place - first[which] * features
    down, along = inner // wide, first[which] + inner % wide
    down, along = down.clamp(max=features - 1), along.clamp(max=tiles.shape[1] - 1)  # for places after the last group
    return tiles[down, along].view(features * TILE_ROWS, -1).view(torch.float8_e8m0fnu)


def _rows(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    scales = row_scales(a.scale, offsets), matrix_scales(b)
    return scaled_rows(a, b, *scales, offsets, out_dtype, sum_to=MX_BLOCK)


def _outer(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    ends = padded_offsets(offsets, alignment(a.quantizer))
    return scaled_outer(a, b, token_scales(a.scale, ends), token_scales(b.scale, ends), ends, out_dtype)


MX = GroupedGemm(
    name="mx",
    detail="native, MX grouped GEMM",
    takes=takes_mx,
    lacks=_lacks,
    rows=_rows,
    outer=_outer,
    calls=("_scaled_grouped_mm",),
)
