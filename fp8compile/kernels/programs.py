"""Numbers of programs of the kernels that quantize a matrix, along each axis of the launch; needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PROGRAMS", "TILE", "packed_programs", "row_programs", "rows_of_program", "tile_programs"]

PROGRAMS = 528  # four for each multiprocessor of an H200
TILE = 128  # rows and columns
PACKED_ROWS, PACKED_COLUMNS = 64, 128  # of a program of `fp8compile.kernels.two_levels`


def row_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Programs that take some whole rows each."""
    return (-(-shape[0] // rows_of_program(shape)),)


def rows_of_program(shape: Sequence[int]) -> int:
    """How many rows a program takes."""
    return max(1, -(-shape[0] // PROGRAMS))


def tile_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Programs that take a tile of a matrix, or of a matrix of a stack."""
    *matrices, m, k = shape
    return (-(-m // TILE), -(-k // TILE), *matrices)


def packed_programs(shape: Sequence[int]) -> tuple[int, ...]:
    """Programs that take 64 rows and 128 columns; they cover whole tiles of scales, of 128 rows by 4 blocks."""
    m, k = shape
    return (-(-m // TILE) * (TILE // PACKED_ROWS), -(-k // PACKED_COLUMNS))
