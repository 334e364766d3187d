"""Small Triton kernels for tests/testing/gpu: test_gpu_interpreter.py and test_batches.py."""

from __future__ import annotations

import importlib.util

import triton
import triton.language as tl
from triton.language import cast as cast_by_name
from triton.language.extra import libdevice

_spec = importlib.util.find_spec(libdevice.__name__)
_copy = importlib.util.module_from_spec(_spec)  # xformers takes functions of a copy
_spec.loader.exec_module(_copy)
rsqrt_of_a_copy = _copy.rsqrt


@triton.jit
def by_names(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, rsqrt_of_a_copy(cast_by_name(tl.load(x_ptr + at), tl.float32)))


@triton.jit
def cast(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def cast_to_e4m3(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def cast_to_e5m2(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float8e5).to(tl.uint8, bitcast=True))


@triton.jit
def maximum(a_ptr, b_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.maximum(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def minimum(a_ptr, b_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.minimum(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def multiply_add(a_ptr, b_ptr, c_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.fma(tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(c_ptr + at)))


@triton.jit
def multiply_then_add(a_ptr, b_ptr, c_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(a_ptr + at) * tl.load(b_ptr + at) + tl.load(c_ptr + at))


@triton.jit
def divide(a_ptr, b_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(a_ptr + at) / tl.load(b_ptr + at))


@triton.jit
def shift(x_ptr, by_ptr, y_ptr, again_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x >> tl.load(by_ptr + at))
    tl.store(again_ptr + at, x)


@triton.jit
def exp(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, libdevice.exp(tl.load(x_ptr + at)))


@triton.jit
def rsqrt(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, libdevice.rsqrt(tl.load(x_ptr + at)))


@triton.jit
def bessel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, libdevice.j0(tl.load(x_ptr + at)))


@triton.jit
def row_sums(x_ptr, y_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, at = tl.arange(0, ROWS), tl.arange(0, SIZE)
    tl.store(y_ptr + row, tl.sum(tl.load(x_ptr + row[:, None] * SIZE + at[None, :]), 1))


@triton.jit
def _larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def row_maxima(x_ptr, y_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, at = tl.arange(0, ROWS), tl.arange(0, SIZE)
    tl.store(y_ptr + row, tl.reduce(tl.load(x_ptr + row[:, None] * SIZE + at[None, :]), 1, _larger))


@triton.jit
def copy(x_ptr, y_ptr, count, FIRST: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK) + FIRST
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < count, other=0.0), at < count)


@triton.jit
def copy_without_mask(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def copy_of_the_first_program(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < count) & (tl.program_id(0) == 0)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask, other=0.0), mask)


@triton.jit
def shift_in_place(x_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + 1, at + 1 < count, other=0.0), at < count)


@triton.jit
def add_up(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + tl.zeros((1,), tl.int32), tl.sum(tl.load(x_ptr + at), 0))


@triton.jit
def last_writes(y_ptr, PROGRAMS: tl.constexpr):
    tl.atomic_xchg(y_ptr, tl.program_id(0))


@triton.jit
def x_grid_barrier(counter_ptr):
    tl.atomic_add(counter_ptr, 1)


@triton.jit
def waits(counter_ptr, PROGRAMS: tl.constexpr):
    x_grid_barrier(counter_ptr)


@triton.jit
def assembly(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + at, y)


@triton.jit
def diverging(x_ptr, y_ptr, counts_ptr, SIZE: tl.constexpr):
    """Change x in place, and then take another way in each kind of program."""
    program = tl.program_id(0)
    at = program * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at) + 1
    tl.store(x_ptr + at, x)
    tl.atomic_add(y_ptr + at, x)
    count = tl.load(counts_ptr + program)
    if count > 2:
        x = x * 3
    for turn in range(count):
        x += turn
    first = program * 4
    for place in range(first, first + 4, 2):
        x += place
    left = count
    while left > 0:
        x -= 2
        left -= 1
    tl.store(x_ptr + at, x)


@triton.jit
def _last_positive(a, a_place, b, b_place):
    keeps_b = b > 0
    return tl.where(keeps_b, b, a), tl.where(keeps_b, b_place, a_place)


@triton.jit
def rearranged(x_ptr, y_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Eight results of each program's matrix, by operators that move, sum, scan and multiply."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    program = tl.program_id(0)
    x = tl.load(x_ptr + (program * ROWS + row) * SIZE + column)
    out = y_ptr + program * 8 * ROWS * SIZE + row * SIZE + column
    step: tl.constexpr = ROWS * SIZE
    tl.store(out, tl.cumsum(x, 1))
    tl.store(out + step, tl.cumsum(x, 0, reverse=True))
    values, places = tl.associative_scan((x, column + 0 * row), 1, _last_positive)
    tl.store(out + 2 * step, values + places)
    tl.store(out + 3 * step, tl.reshape(tl.trans(x), (ROWS, SIZE)))
    even, odd = tl.split(tl.reshape(x, (ROWS, SIZE // 2, 2)))
    tl.store(out + 4 * step, tl.reshape(tl.join(odd, even), (ROWS, SIZE)))
    tl.store(out + 5 * step, tl.sum(x) - tl.max(x, 1)[:, None] + tl.min(x, 0)[None, :] * column)
    tl.store(out + 6 * step, tl.dot(x, tl.trans(x), input_precision="ieee") if ROWS == SIZE else x)
    tl.store(out + 7 * step, tl.gather(x, (column + 1) % SIZE + 0 * row, 1))


@triton.jit
def counted(x_ptr, y_ptr, SIZE: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * SIZE + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(x, BINS))


@triton.jit
def tiles_by_pointers(x_ptr, y_ptr, M, N, TILE: tl.constexpr):
    """Copy a matrix, two tiles a program: the second one by an advanced pointer."""
    m = tl.program_id(0) * TILE
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (m, 0), (TILE, TILE), (1, 0))
    y = tl.make_block_ptr(y_ptr, (M, N), (N, 1), (m, 0), (TILE, TILE), (1, 0))
    for _ in range(2):
        tl.store(y, tl.load(x, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        x, y = tl.advance(x, (0, TILE)), tl.advance(y, (0, TILE))


@triton.jit
def tiles_by_descriptors(x_ptr, y_ptr, M, N, TILE: tl.constexpr):
    """Copy a matrix, a tile a program."""
    m, n = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    x = tl.make_tensor_descriptor(x_ptr, (M, N), (N, 1), (TILE, TILE))
    y = tl.make_tensor_descriptor(y_ptr, (M, N), (N, 1), (TILE, TILE))
    y.store([m, n], x.load([m, n]))
