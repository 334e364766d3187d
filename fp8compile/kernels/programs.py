"""Launch grids, as numbers of Triton programs, of kernels that quantize a matrix. Does not import Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = [
    "PROGRAMS",
    "TILE",
    "num_tile_programs",
    "packed_programs",
    "row_programs",
    "rows_of_program",
    "several_programs",
    "several_tile",
    "tile_programs",
]

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 128  # rows and columns
SMALL_TILE = 64  # of programs that quantize several matrices, if no block is longer
PACKED_ROWS, PACKED_COLUMNS = 64, 128  # of a program of `fp8compile.kernels.quantize_two_levels`


def row_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the launch grid of a kernel in which each program takes some whole rows of a matrix."""
    return (-(-shape[0] // rows_of_program(shape)),)


def rows_of_program(shape: Sequence[int]) -> int:
    """Return the number of rows that each program takes in the grid of `row_programs`, at least 1."""
    return max(1, -(-shape[0] // PROGRAMS))


def tile_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the launch grid of a kernel with a program for each 128 x 128 tile of a matrix or of stacked matrices."""
    *matrices, m, k = shape
    return (-(-m // TILE), -(-k // TILE), *matrices)


def num_tile_programs(shape: Sequence[int]) -> int:
    """Return the number of programs in the grid of `tile_programs`."""
    return math.prod(tile_programs(shape))


def several_tile(block: int) -> int:
    """Return the number of rows, and of columns, of a tile in `several_programs`; ``block`` is the blocks' length."""
    return max(SMALL_TILE, block)


def several_programs(shape: Sequence[int], block: int) -> tuple[int, int, int]:
    """Return the launch grid of a kernel in which a program takes a tile at the same position of several matrices."""
    m, k = shape
    tile = several_tile(block)
    return (-(-m // tile), -(-k // tile), 1)


def packed_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the launch grid of a kernel in which each program takes 64 rows and 128 columns of a matrix.

    Rows are rounded up to 128, so that programs also fill the last tiles of scales.
    """
    m, k = shape
    return (-(-m // TILE) * (TILE // PACKED_ROWS), -(-k // PACKED_COLUMNS))
