"""How many programs kernels that quantize a matrix launch, along each axis of the grid; needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PROGRAMS", "TILE", "packed_programs", "row_programs", "rows_of_program", "tile_programs"]

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 128  # rows and columns
PACKED_ROWS, PACKED_COLUMNS = 64, 128  # of a program of `fp8compile.kernels.quantize_two_levels`


def row_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """The grid of a kernel whose programs each take some whole rows."""
    return (-(-shape[0] // rows_of_program(shape)),)


def rows_of_program(shape: Sequence[int]) -> int:
    """How many rows a program takes in the grid of `row_programs`."""
    return max(1, -(-shape[0] // PROGRAMS))


def tile_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """The grid of a kernel whose programs each take one tile, of a matrix or of a stack of matrices."""
    *matrices, m, k = shape
    return (-(-m // TILE), -(-k // TILE), *matrices)


def packed_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """The grid of a kernel whose programs each take 64 rows and 128 columns; it covers whole tiles of scales."""
    m, k = shape
    return (-(-m // TILE) * (TILE // PACKED_ROWS), -(-k // PACKED_COLUMNS))
