"""Launch grids, as numbers of Triton programs, of kernels that quantize a matrix. Does not import Triton."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "PROGRAMS",
    "TILE",
    "packed_programs",
    "tile_programs",
]

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 128  # rows and columns
PACKED_ROWS, PACKED_COLUMNS = 64, 128  # of a program of `fp8compile.kernels.quantize_two_levels`


def tile_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the launch grid of a kernel with a program for each 128 x 128 tile of a matrix or of stacked matrices."""
    *matrices, m, k = shape
    return (-(-m // TILE), -(-k // TILE), *matrices)


def packed_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the launch grid of a kernel in which each program takes 64 rows and 128 columns of a matrix.

    Rows are rounded up to 128, so that programs also fill the last tiles of scales.
    """
    m, k = shape
    return (-(-m // TILE) * (TILE // PACKED_ROWS), -(-k // PACKED_COLUMNS))
