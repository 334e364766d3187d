"""Memory layouts in which a GPU's GEMMs read the scales of an operand; values do not change.

    blocks of 1 x 128      column-major: the scale of (row, block) is at row + block * rows
    blocks of 128 x 128    row-major along the summed dim, which is padded until rows have a multiple of four scales
    MX and NVFP4           tiles of 128 rows by 4 blocks, 512 bytes each; rows 32 apart are next to each other

Sources: PyTorch's checks in `_scaled_mm` (aten/src/ATen/native/cuda/ScaledBlas.cpp); cuBLAS documentation, "1D Block
Scaling Factors Layout".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "TILE_BLOCKS", "TILE_ROWS", "down_the_rows", "for_each_row", "places_in_tiles", "swizzled", "tiled", "tiles_numel",
    "untiled",
]  # fmt: skip

TILE_ROWS, TILE_BLOCKS, GROUP = 128, 4, 32


def down_the_rows(scale: Tensor) -> Tensor:
    """Copy scales (rows, blocks per row) to column-major memory: the same shape, with strides (1, rows)."""
    return scale.t().contiguous().t()


def for_each_row(scale: Tensor, block_rows: int, rows: int) -> Tensor:
    """Repeat scales (..., rows of blocks, blocks per row) for each row of their blocks: (..., rows, blocks per row).

    Some GEMMs read a scale for each row. The last blocks may have fewer than ``block_rows`` rows.
    """
    return scale if block_rows == 1 else scale.repeat_interleave(block_rows, -2)[..., :rows, :]


def tiled(scale: Tensor) -> Tensor:
    """Arrange scale bytes (..., rows, blocks per row) as the tensor core's tiles of 128 rows by 4 blocks.

    The result is (..., tiles down, tiles along, 32, 4, 4), a permuted view; missing rows and blocks of the last tiles
    are zeros. Flattening the result copies it with one kernel.
    """
    *leading, rows, blocks = scale.shape
    padded = pad(scale, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    sides = padded.shape[-2] // TILE_ROWS, TILE_ROWS // GROUP, GROUP, padded.shape[-1] // TILE_BLOCKS, TILE_BLOCKS
    first = len(leading)
    order = (*range(first), *(first + dim for dim in (0, 3, 2, 1, 4)))
    return padded.view(*leading, *sides).permute(order)


def tiles_numel(rows: int, blocks: int) -> int:
    """Number of bytes in the tiles of scales (``rows``, ``blocks`` per row), with padding."""
    down, along = (rows + TILE_ROWS - 1) // TILE_ROWS, (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS
    return down * along * TILE_ROWS * TILE_BLOCKS


def untiled(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo `tiled`: take scales (``rows``, ``blocks`` per row) out of a 1-D tensor of tiles."""
    down, along = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    found = tiles.view(down, along, GROUP, TILE_ROWS // GROUP, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return found.reshape(down * TILE_ROWS, along * TILE_BLOCKS)[:rows, :blocks]


def places_in_tiles(row: Tensor, block: Tensor, blocks: Tensor) -> Tensor:
    """Return the positions in 1-D tiles of the scales of (``row``, ``block``); ``blocks`` is a multiple of 4."""
    tile = row // TILE_ROWS * (blocks // TILE_BLOCKS) + block // TILE_BLOCKS
    inside = row % GROUP * (TILE_ROWS // GROUP) + row % TILE_ROWS // GROUP
    return tile * (TILE_ROWS * TILE_BLOCKS) + inside * TILE_BLOCKS + block % TILE_BLOCKS


def swizzled(scale: Tensor) -> Tensor:
    """Arrange scale bytes (rows, blocks per row) as a 1-D float8_e8m0fnu tensor of tiles, see `tiled`."""
    return tiled(scale).reshape(-1).view(torch.float8_e8m0fnu)
