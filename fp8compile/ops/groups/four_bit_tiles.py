"""The layout of groups for a GPU's four-bit grouped GEMM: each group is padded to whole tiles of 128 columns.

    tokens (R)              a a a b b b b b . .       offsets (3, 3, 8): the second group has no tokens
    columns (C)             a a a 0 0 0 0 0 b b b b b 0 0 0      drawn with tiles of 4 columns

Scales are in tiles of 128 rows by 4 blocks of 16 (`fp8compile.scale_layouts`). A group without tokens has a tile of
zeros, because the GEMM would leave the result of an empty group unwritten.

Sources: `set_grouped_gemm_args_kernel` of MSLK, which PyTorch's product calls; `torchao.prototype.moe_training`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops.groups.padding import group_to_read, padded_offsets, sizes_of_groups
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import TILE_ROWS, places_in_tiles, untiled

__all__ = ["scales_of_rows", "scales_of_tokens", "tile_columns", "tile_ends", "tile_spans"]


def tile_columns(rows: int, groups: int) -> int:
    """Return an upper bound of the number of columns for ``rows`` tokens in ``groups`` groups, each in whole tiles."""
    return (rows // TILE_ROWS + groups) * TILE_ROWS


def tile_ends(offsets: Tensor) -> Tensor:
    """Return where each of E groups ends, (E,) int32, among columns that are padded to whole tiles.

    ``offsets`` are the ends of the groups among the tokens.
    """
    tiles = ((sizes_of_groups(offsets) + (TILE_ROWS - 1)) // TILE_ROWS).clamp(min=1)
    return (tiles * TILE_ROWS).cumsum(0, dtype=torch.int32)


def tile_spans(offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield each group's slice of rows and slice of padded columns; reads the ends of groups on the host."""
    start, column = 0, 0
    for end, column_end in zip(offsets.tolist(), tile_ends(offsets).tolist(), strict=True):
        yield slice(start, end), slice(column, column_end)
        start, column = end, column_end


def scales_of_rows(tiles: Tensor, offsets: Tensor, rows: int, blocks: int) -> Tensor:
    """Return each row's scales, (rows, blocks), from the tiles of all groups; the host reads no sizes of groups.

    ``tiles`` has the scales of all groups as bytes, (padded rows, padded blocks). Rows after the last group get
    arbitrary scales.
    """
    group, zero = group_to_read(offsets, rows), offsets.new_zeros(1)
    first_row, first_place = (torch.cat((zero, ends))[group] for ends in (offsets, padded_offsets(offsets, TILE_ROWS)))
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    place = (first_place + row - first_row).clamp(max=tiles.shape[0] - 1)
    return untiled(tiles.flatten(), tiles.shape[0], blocks)[place]


def scales_of_tokens(tiles: Tensor, offsets: Tensor, shape: torch.Size) -> Tensor:
    """Return the scales of blocks of 16 tokens, (blocks, features), from the tiles of all groups.

    ``shape`` is (padded tokens, features). Blocks after the last group get arbitrary scales.
    """
    ends, (columns, features) = tile_ends(offsets) // GROUP, shape
    block = torch.arange(columns // GROUP, dtype=torch.int32, device=offsets.device)
    group = torch.searchsorted(ends, block, right=True).clamp(max=offsets.shape[0] - 1)
    first, blocks = torch.cat((ends.new_zeros(1), ends))[group], sizes_of_groups(ends)[group]
    feature = torch.arange(features, device=offsets.device)
    place = first.unsqueeze(1) * tiles.shape[0] + places_in_tiles(
        feature, (block - first).unsqueeze(1), blocks.unsqueeze(1)
    )
    return tiles.flatten()[place.clamp(max=tiles.numel() - 1)]
