"""Triton kernels with one planted fault each, for tests/testing/gpu/test_faulty_kernels.py.

The line of a fault ends in "# planted".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, PADDED = 10, 24, 32


@triton.jit
def without_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # planted
    tl.store(out_ptr + at, x, at < n)


@triton.jit
def mask_one_too_far(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    tl.store(out_ptr + at, x, at <= n)  # planted


@triton.jit
def stride_of_padded_rows(x_ptr, out_ptr, columns, padded, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * padded + at, at < columns)  # planted
    tl.store(out_ptr + row * columns + at, x, at < columns)


@triton.jit
def strides_exchanged(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, at < columns)
    tl.store(out_ptr + row + at, x, at < columns)  # planted


@triton.jit
def without_barrier(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Each program adds to what the one before it wrote."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out_ptr + program - 1, program > 0, other=0.0)  # planted
    tl.store(out_ptr + program, before + tl.sum(tl.load(x_ptr + at, at < n, other=0.0)))


@triton.jit
def overlapping(x_ptr, out_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n), at < n)  # planted


@triton.jit
def adds_without_atomic(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, at < n, other=0.0))
    tl.store(out_ptr, tl.load(out_ptr) + total)  # planted


@triton.jit
def adds_by_atomics(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, at < n, other=0.0))
    tl.atomic_add(out_ptr, total)  # planted


@triton.jit
def tile_off_its_alignment(x, out, TILE: tl.constexpr):
    column = tl.program_id(0) * TILE
    block = x.load([0, column + 1])  # planted
    out.store([0, column], block)


@triton.jit
def tiles_beyond_memory(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, (rows + 1, columns), (columns, 1), (TILE, TILE))
    row = tl.program_id(0) * TILE
    block = x.load([row, 0])  # planted
    out = tl.make_tensor_descriptor(out_ptr, (rows, columns), (columns, 1), (TILE, TILE))
    out.store([row, 0], block)


# planted: the grid is that of blocks of 64, and the key does not tell the two sizes apart
@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (64, 32)], key=[])
@triton.jit
def tuned_for_another_size(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n), at < n)


@triton.jit
def sums_in_float16(a_ptr, b_ptr, out_ptr, K, TILE: tl.constexpr):
    m, n = tl.arange(0, TILE), tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float16)
    for first in range(0, K, TILE):
        k = first + tl.arange(0, TILE)
        a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * TILE + n[None, :])
        total = tl.dot(a.to(tl.float16), b.to(tl.float16), total, out_dtype=tl.float16)  # planted
    tl.store(out_ptr + m[:, None] * TILE + n[None, :], total.to(tl.float32))


def _of_rows(kernel, x: Tensor, *sizes: int) -> Tensor:
    out = torch.empty(ROWS, COLUMNS)
    kernel[(ROWS,)](x, out, *sizes, BLOCK=PADDED)
    return out


def _of_blocks(kernel, x: Tensor, size: int | None = None, **constants: int) -> Tensor:
    out = torch.empty(x.numel() if size is None else size)
    kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64, **constants)
    return out


def in_a_total(x: Tensor) -> Tensor:
    out = torch.zeros(1)
    adds_without_atomic[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def in_any_order(x: Tensor) -> Tensor:
    out = torch.zeros(1)
    adds_by_atomics[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def off_its_alignment(x: Tensor) -> Tensor:
    out = torch.empty(ROWS, COLUMNS)
    given, result = (TensorDescriptor.from_tensor(each, [8, 8]) for each in (x.view(ROWS, COLUMNS), out))
    tile_off_its_alignment[(3,)](given, result, TILE=8)
    return out


def beyond_memory(x: Tensor) -> Tensor:
    out = torch.empty(ROWS, COLUMNS)
    tiles_beyond_memory[(2,)](x, out, ROWS, COLUMNS, TILE=8)
    return out


def tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tuned_for_another_size[(triton.cdiv(x.numel(), 64),)](x, out, x.numel())
    return out


def summed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(16, 16)
    sums_in_float16[(1,)](a, b, out, a.shape[1], TILE=16)
    return out


FUNCTIONS = {
    "without_mask": lambda x: _of_blocks(without_mask, x),
    "mask_one_too_far": lambda x: _of_blocks(mask_one_too_far, x),
    "stride_of_padded_rows": lambda x: _of_rows(stride_of_padded_rows, x, COLUMNS, PADDED),
    "strides_exchanged": lambda x: _of_rows(strides_exchanged, x, ROWS, COLUMNS),
    "without_barrier": lambda x: _of_blocks(without_barrier, x, 4),
    "overlapping": lambda x: _of_blocks(overlapping, x, STEP=60),
    "adds_without_atomic": in_a_total,
    "adds_by_atomics": in_any_order,
    "tile_off_its_alignment": off_its_alignment,
    "tiles_beyond_memory": beyond_memory,
    "tuned_for_another_size": tuned,
}
