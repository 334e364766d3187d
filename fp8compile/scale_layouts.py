"""Layouts in which GEMMs of a GPU want the scales of an operand: the values, elsewhere in memory.

    a block of 1 x 128     down the rows first: element (row, block) at row + block * rows
    a block of 128 x 128   along the sum first, each row of blocks begun at a multiple of four
    MX and NVFP4           tiles of 128 rows by 4 blocks, 512 bytes each, rows 32 apart side by side

Sources: PyTorch's checks in `_scaled_mm` (aten/src/ATen/native/cuda/ScaledBlas.cpp); cuBLAS documentation, "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "TILE_BLOCKS", "TILE_ROWS", "down_the_rows", "for_each_row", "rows_of_fours", "swizzled", "tiled", "tiles_numel",
    "untiled",
]  # fmt: skip

TILE_ROWS, TILE_BLOCKS, GROUP = 128, 4, 32


def down_the_rows(scale: Tensor) -> Tensor:
    """(rows, blocks), the same shape with strides (1, rows)."""
    return scale.t().contiguous().t()


def for_each_row(scale: Tensor, block_rows: int, rows: int) -> Tensor:
    """Scales (..., rows, blocks) that a GEMM reads for single rows, from those of blocks of several rows.

    Args:
        scale: (..., rows of blocks, blocks).
        block_rows: Rows of a block; scales of blocks of one row are given back as they are.
        rows: Of the codes; the last blocks may have fewer rows than others.
    """
    return scale if block_rows == 1 else scale.repeat_interleave(block_rows, -2)[..., :rows, :]


def rows_of_fours(scale: Tensor) -> Tensor:
    """(rows of blocks, blocks), the same shape with a row stride that is a multiple of four."""
    blocks = scale.shape[1]
    return pad(scale, (0, -blocks % TILE_BLOCKS)).contiguous()[:, :blocks]


def tiled(scale: Tensor) -> Tensor:
    """Bytes (..., rows, blocks) as tiles of the tensor core, (..., tiles down, tiles along, 32, 4, 4), zeros behind.

    It is a view that is turned; flattened in one step, it is copied in one kernel.
    """
    *leading, rows, blocks = scale.shape
    padded = pad(scale, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    sides = padded.shape[-2] // TILE_ROWS, TILE_ROWS // GROUP, GROUP, padded.shape[-1] // TILE_BLOCKS, TILE_BLOCKS
    first = len(leading)
    order = (*range(first), *(first + dim for dim in (0, 3, 2, 1, 4)))
    return padded.view(*leading, *sides).permute(order)


def tiles_numel(rows: int, blocks: int) -> int:
    """How many bytes the tiles of scales (rows, blocks) have."""
    down, along = (rows + TILE_ROWS - 1) // TILE_ROWS, (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS
    return down * along * TILE_ROWS * TILE_BLOCKS


def untiled(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `tiled`: scales (rows, blocks) from their tiles, given 1-D."""
    down, along = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    found = tiles.view(down, along, GROUP, TILE_ROWS // GROUP, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return found.reshape(down * TILE_ROWS, along * TILE_BLOCKS)[:rows, :blocks]


def swizzled(scale: Tensor) -> Tensor:
    """Bytes (rows, blocks), 1-D as tiles of the tensor core; what is missing in the last ones is 0."""
    return tiled(scale).reshape(-1).view(torch.float8_e8m0fnu)
