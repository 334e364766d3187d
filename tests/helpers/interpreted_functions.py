"""Small Triton kernels for tests/testing/gpu/test_gpu_interpreter.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


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
