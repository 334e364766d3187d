"""Blocks: shapes of grids, amax and expansion against a loop over elements, for odd sizes and any number of dims."""

from __future__ import annotations

import math

import pytest
import torch

from fp8compile.quantizers.blocks import as_matrix, block_amax, check_block, expand_blocks, grid_shape

BLOCKS = [(-1, -1), (1, -1), (-1, 1), (1, 1), (1, 16), (16, 1), (16, 16), (3, 5), (128, 128), (-1, 7), (2, -1)]
SHAPES = [(1,), (24,), (129,), (1, 1), (17, 24), (16, 32), (5, 100), (33, 1), (2, 3, 24), (3, 1, 17), (2, 3, 2, 9)]
EMPTY = [(0,), (0, 24), (5, 0), (2, 0, 8), (0, 0)]


def _by_loop(x: torch.Tensor, block: tuple[int, int]) -> tuple[list[list[float]], list[list[tuple[int, int]]]]:
    """Amax of each block, and the block that each element of the (M, K) view lies in, element by element."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    height, width = rows if block[0] == -1 else block[0], columns if block[1] == -1 else block[1]
    values = x.reshape(rows, columns).tolist()
    amax = [[0.0] * math.ceil(columns / width) for _ in range(math.ceil(rows / height))]
    where = [[(i // height, j // width) for j in range(columns)] for i in range(rows)]
    for i in range(rows):
        for j in range(columns):
            row, column = where[i][j]
            amax[row][column] = max(amax[row][column], abs(values[i][j]))
    return amax, where


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_amax_and_expansion_are_those_of_a_loop(shape, block, assert_bits_equal):
    x = torch.randn(shape)
    amax, where = _by_loop(x, block)
    result = block_amax(x, block)
    assert result.shape == grid_shape(shape, block)
    assert_bits_equal(result.reshape(-1), torch.tensor(amax).reshape(-1))
    expanded = expand_blocks(result, shape, block).expand(math.prod(shape[:-1]), shape[-1])
    assert_bits_equal(expanded, torch.tensor([[amax[i][j] for i, j in row] for row in where]))


@pytest.mark.parametrize(
    ("shape", "block", "grid"),
    [
        ((2, 3, 24), (1, -1), (2, 3, 1)),
        ((2, 3, 24), (-1, -1), (1, 1, 1)),
        ((2, 3, 24), (-1, 1), (1, 1, 24)),
        ((2, 3, 24), (1, 16), (2, 3, 2)),
        ((2, 3, 24), (4, 16), (2, 2)),  # a block holds rows of two batches
        ((2, 3, 2, 9), (5, -1), (3, 1)),
        ((24,), (1, -1), (1,)),
        ((24,), (-1, 1), (24,)),
        ((24,), (16, 16), (1, 2)),
        ((300, 129), (128, 128), (3, 2)),
        ((), (-1, -1), ()),
    ],
)
def test_grids_keep_leading_dims_unless_a_block_holds_several_rows(shape, block, grid):
    assert grid_shape(shape, block) == grid


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_tensors_have_zero_amax_and_empty_expansion(shape, block, assert_bits_equal):
    grid = grid_shape(shape, block)
    assert_bits_equal(block_amax(torch.empty(shape), block), torch.zeros(grid))
    matrix = as_matrix(torch.empty(shape))
    assert torch.broadcast_shapes(expand_blocks(torch.zeros(grid), shape, block).shape, matrix.shape) == matrix.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
def test_permuted_and_strided_inputs_give_what_their_copies_give(dtype, block, assert_bits_equal):
    base = torch.randn(6, 5, 34).to(dtype)
    for x in (
        base.permute(1, 0, 2),
        base.permute(2, 0, 1),
        base[::2, :, ::3],
        base.flip(0).mT,
        base.expand(2, 6, 5, 34),
    ):
        assert_bits_equal(block_amax(x, block), block_amax(x.contiguous(), block))


@pytest.mark.parametrize(
    ("block", "at"),
    [
        ((1, 16), (18, 2)),
        ((16, 16), (1, 2)),
        ((1, -1), (18, 0)),
        ((-1, 1), (0, 33)),
        ((-1, -1), (0, 0)),
        ((3, 5), (6, 6)),
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_special_value_reaches_its_block_and_no_other(block, at, bad, assert_bits_equal):
    x = torch.randn(20, 36)
    expected = block_amax(x, block)
    expected[at] = abs(bad)
    x[18, 33] = bad
    assert_bits_equal(block_amax(x, block), expected)


def test_the_smallest_subnormal_is_an_amax():
    assert block_amax(torch.tensor([[0.0, -(2.0**-149)]]), (1, -1)).item() == 2.0**-149


@pytest.mark.parametrize("block", [(0, 1), (1, 0), (-2, 1), (1,), (1, 2, 3), [1, 128], 128, (1.0, 2), (True, 1), None])
def test_what_is_no_block_is_refused(block):
    with pytest.raises(
        ValueError, match=r"^Owner: `block` is .*; it must be a tuple \(rows, columns\) of ints, each at least 1"
    ):
        check_block("Owner", block)


def test_a_grid_is_laid_down_as_that_of_its_tensor_or_refused():
    grid = torch.arange(4.0).view(4, 1)
    assert torch.equal(expand_blocks(grid.t(), (4, 4), (1, -1)), expand_blocks(grid, (4, 4), (1, -1)))
    with pytest.raises(RuntimeError, match="invalid for input of size 1"):
        expand_blocks(grid[:1], (4, 4), (1, -1))
