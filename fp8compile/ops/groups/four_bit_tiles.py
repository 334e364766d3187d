"""The layout of groups for a GPU's four-bit grouped GEMM: each group has whole tiles of 128 columns.

    tokens (R)              a a a b b b b b . .       offsets (3, 3, 8): the second group has no tokens
    columns (C), tiles of 4 a a a 0 0 0 0 0 b b b b b 0 0 0

A group has at least one tile. Scales are in tiles of 128 rows by 4 blocks of 16 (`fp8compile.scale_layouts`). A group
without tokens has a tile of zeros, so that its grad_weight is zeros; without this tile, the GEMM would leave the
result unwritten.

Sources: `set_grouped_gemm_args_kernel` of MSLK, which PyTorch's product calls; `torchao.prototype.moe_training`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops.groups.padding import group_to_read, padded_offsets, sizes_of_groups
from fp8compile.scale_layouts import TILE_ROWS, untiled

__all__ = ["scales_of_rows", "tile_columns", "tile_ends", "tile_spans"]


def tile_columns(rows: int, groups: int) -> int:
    """Number of columns of transposed codes that suffices for every split of ``rows`` tokens into groups.

    Each of ``groups`` groups takes whole tiles of 128 columns.
    """
    return (rows // TILE_ROWS + groups) * TILE_ROWS


def tile_ends(offsets: Tensor) -> Tensor:
    """End of each of E groups among the columns of transposed codes in whole tiles, (E,) int32.

    A group begins at the end of the previous group. ``offsets`` are the ends of the groups among the tokens.
    """
    tiles = ((sizes_of_groups(offsets) + (TILE_ROWS - 1)) // TILE_ROWS).clamp(min=1)
    return (tiles * TILE_ROWS).cumsum(0, dtype=torch.int32)


def tile_spans(offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield each group's slice of rows and slice of columns, with padding to whole tiles.

    ``offsets``, the ends of the groups among the rows, are read on the host.
    """
    start, column = 0, 0
    for end, column_end in zip(offsets.tolist(), tile_ends(offsets).tolist(), strict=True):
        yield slice(start, end), slice(column, column_end)
        start, column = end, column_end


def scales_of_rows(tiles: Tensor, offsets: Tensor, rows: int, blocks: int) -> Tensor:
    """The scales of each row, (rows, blocks), read from the tiles of all groups.

    ``tiles`` has the groups' scales, one group after another, as bytes: (rows padded to whole tiles, at least
    ``blocks``). The host reads no size of a group. A row after the last group gets an arbitrary scale.
    """
    group, zero = group_to_read(offsets, rows), offsets.new_zeros(1)
    first_row, first_place = (torch.cat((zero, ends))[group] for ends in (offsets, padded_offsets(offsets, TILE_ROWS)))
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    place = (first_place + row - first_row).clamp(max=tiles.shape[0] - 1)
    return untiled(tiles.flatten(), tiles.shape[0], blocks)[place]
