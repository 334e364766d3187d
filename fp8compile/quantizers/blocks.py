"""Blocks: the rectangles of elements that share one scale.

A tensor of any rank is viewed as a matrix (M, K): K is its last dim, and M is all leading dims, flattened. A vector is
(1, K). A block (bm, bk) cuts this matrix into a grid; -1 stands for the whole dim. Blocks at the edge may be smaller.

The grid keeps the leading dims if possible, so that scales broadcast against their tensor:

    shape of x     block        shape of the grid
    (B, S, K)      (1, -1)      (B, S, 1)
    (B, S, K)      (-1, -1)     (1, 1, 1)
    (B, S, K)      (1, 128)     (B, S, ceil(K / 128))
    (B, S, K)      (128, 128)   (ceil(B * S / 128), ceil(K / 128))     a block may have rows of two batch entries
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import guard_or_false, is_unbacked, statically_equal, statically_true, without_elements
from fp8compile.target import target_of

__all__ = ["Block", "as_matrix", "block_amax", "check_block", "expand_blocks", "from_matrix", "grid_shape", "scaled"]

Block = tuple[int, int]

WHOLE_SIDES = ((-1, -1), (1, -1), (-1, 1))  # blocks that fit tensors of any size without padding


def check_block(owner: str, block: object) -> None:
    """Raise a ValueError unless ``block`` is a pair of ints, each -1 or at least 1.

    ``owner`` is the class that the error names.
    """
    pair = isinstance(block, tuple) and len(block) == 2 and all(type(b) is int for b in block)
    if not pair or any(b < 1 and b != -1 for b in block):  # type: ignore[attr-defined]
        raise ValueError(
            f"{owner}: `block` is {block!r}; it must be a tuple (rows, columns) of ints, each at least 1, or -1 for "
            "the full dim: (-1, -1) tensorwise, (1, -1) rowwise, (-1, 1) columnwise, (1, 128), (128, 128)."
        )


def _count(size: int, block: int) -> int:
    return 1 if block == -1 else size if block == 1 else (size + block - 1) // block


def _rows_columns(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def as_matrix(x: Tensor) -> Tensor:
    """View a tensor as a matrix with all leading dims flattened; a copy if strides allow no view."""
    return x if x.ndim == 2 else x.reshape(_rows_columns(x.shape))


def from_matrix(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a matrix from `as_matrix`, or a grid of the matrix's blocks, to ``shape``."""
    return matrix if len(shape) == 2 else matrix.reshape(shape)


def grid_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Return the shape of the grid of blocks over a tensor of shape ``shape``; blocks are (rows, columns).

    The grid has one entry per block. Leading dims are kept if the block has one row or all rows.
    """
    if len(shape) == 0:
        return ()
    leading, columns = tuple(shape[:-1]), shape[-1]
    if block[0] == -1:
        leading = (1,) * len(leading)
    elif block[0] != 1:
        leading = (_count(math.prod(leading), block[0]),)
    return (*leading, 1 if block[1] == -1 else _count(columns, block[1]))


def _sides(rows: int, columns: int, block: Block) -> tuple[int, int, int, int]:
    block_rows = rows if block[0] == -1 else block[0]
    block_columns = columns if block[1] == -1 else block[1]
    return _count(rows, block[0]), block_rows, _count(columns, block[1]), block_columns


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Compute the exact largest magnitude in each block; NaN if a block contains a NaN, 0 if it is empty.

    Blocks refer to ``x`` viewed as a matrix with `as_matrix`. The result has shape ``grid_shape(x.shape, block)`` and
    the dtype of ``x``.
    """
    grid = grid_shape(x.shape, block)
    if guard_or_false(x.numel() == 0):
        return without_elements(x.new_zeros(grid), x)
    magnitude = as_matrix(x).abs()
    if block in WHOLE_SIDES:
        if block[0] == -1 and is_unbacked(magnitude.shape[0]):
            # amax of an empty dim raises, and it is not known yet whether there is a row
            magnitude = pad(magnitude, (0, 0, 0, 1))
        if block == (-1, -1):  # flat, because over two dims Inductor splits a reduction after a norm into more kernels
            return magnitude.amax().view(grid)
        return from_matrix(magnitude.amax(1 if block[0] == 1 else 0, keepdim=True), grid)
    rows, columns = _rows_columns(x.shape)
    grid_rows, block_rows, grid_columns, block_columns = _sides(rows, columns, block)
    missing_rows, missing_columns = grid_rows * block_rows - rows, grid_columns * block_columns - columns
    if block[0] == -1 and is_unbacked(rows):
        missing_rows = 1  # amax of an empty dim raises
    if not statically_equal((missing_rows, missing_columns), (0, 0)):
        magnitude = pad(magnitude, (0, missing_columns, 0, missing_rows))  # zeros do not change an amax
    return from_matrix(magnitude.view(grid_rows, block_rows, grid_columns, block_columns).amax((1, 3)), grid)


def _block_index(size: int, block: int, device: torch.device) -> Tensor:
    """Return ``i // block`` for each i below ``size``: the number of the block that position i is in; int64.

    For code that Inductor's C++ backend (PyTorch 2.11 to 2.15) compiles, `//` would leave a partial last block
    unwritten. If there is one, this function divides in a form that Inductor does not recognize.
    """
    index = torch.arange(size, device=device)
    if target_of(device).type != "cpu" or statically_true(size % block == 0):
        return index // block
    return (index.double() / block).floor().long()  # exact below 2**53


def _is_one(blocks: int) -> bool:
    """Whether ``blocks``, the number of blocks along a dim, is the plain int 1.

    False for a symbolic size that a guard fixed to 1, because Inductor (up to PyTorch 2.13) would read out of bounds.
    """
    return isinstance(blocks, int) and blocks == 1


def expand_blocks(per_block: Tensor, shape: Sequence[int], block: Block) -> Tensor:
    """Repeat each block's value for its elements; the result broadcasts against `as_matrix` of a tensor.

    ``shape`` is the tensor's shape; ``per_block`` has shape ``grid_shape(shape, block)``.
    """
    may_broadcast = block in WHOLE_SIDES and len(shape) == per_block.ndim == 2
    if may_broadcast and statically_equal(per_block.shape, grid_shape(shape, block)):
        return per_block  # what the general way below returns too, for 1 % more of an eager call
    rows, columns = _rows_columns(shape)
    grid_rows, block_rows, grid_columns, block_columns = _sides(rows, columns, block)
    values, wanted = per_block, (grid_rows, grid_columns)
    if values.ndim != 2 or not statically_equal(values.shape, wanted):
        values = values.reshape(wanted)  # reshape, because a slice of a grid with more dims allows no view
    # Index with numbers: expand and reshape raise an AssertionError in the same loop splitting of Inductor.
    if not _is_one(grid_columns) and block_columns != 1:
        values = values[:, _block_index(columns, block_columns, values.device)]
    if not _is_one(grid_rows) and block_rows != 1:
        values = values[_block_index(rows, block_rows, values.device)]
    return values


def scaled(x: Tensor, multiplier: Tensor, block: Block) -> Tensor:
    """Return each value of ``x`` times its block's multiplier (1 / scale), float32, in the shape of ``as_matrix(x)``.

    ``multiplier`` has shape ``grid_shape(x.shape, block)``.
    """
    return as_matrix(x).float() * expand_blocks(multiplier, x.shape, block)
