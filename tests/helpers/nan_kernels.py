"""Triton kernels that make a NaN at one line, which ends in "# planted", for tests/testing/gpu/test_nan_origin.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK, PROGRAMS = 16, 12
COUNT = BLOCK * PROGRAMS - 3  # the last program has lanes outside of its mask


@triton.jit
def divided(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Zero by zero; in lanes outside of the mask too, where it is never stored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=0.0)
    beyond = tl.where(at < n, 1.0, 0.0) / tl.where(at < n, 1.0, 0.0)
    ratio = x / (x + 0.0)  # planted
    tl.store(out_ptr + at, (ratio * 2 + 1) * beyond, at < n)


@triton.jit
def replaced(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The NaN of the first division is replaced; that of the difference is stored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    ratio = x / x
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    large = 1 / x
    same = large - large  # planted
    tl.store(out_ptr + at, same.to(tl.bfloat16).to(tl.float32) + ratio, at < n)


@triton.jit
def summed(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    signs = tl.where(tl.arange(0, BLOCK) % 2 == 0, 1.0, -1.0)
    total = tl.sum(tl.where(x == 0, float("inf"), 1.0) * signs + tl.where(x == 0, 0.0, 0.0), 0)
    total = total + tl.sum(tl.where(tl.max(tl.where(x == 0, 1.0, 0.0), 0) > 0, signs / 0.0, 0.0), 0)  # planted
    tl.store(out_ptr + at, x + total, at < n)


@triton.jit
def multiplied(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    tile = tl.where((x[:, None] == 0) & (at[None, :] >= 0), float("inf"), 1.0)
    product = tl.dot(tile, tl.zeros((BLOCK, BLOCK), tl.float32))  # planted
    tl.store(out_ptr + at, tl.max(product.trans(), 0) + x + tl.sum(product, 1), at < n)


@triton.jit
def of_a_library(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    angle = libdevice.acos(tl.where(x == 0, 2.0, 0.5))  # planted
    tl.store(out_ptr + at, tl.join(angle, x).split()[0], at < n)


@triton.jit
def in_a_loop(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The programs differ in their numbers of turns, so that they run apart."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    total = x
    for turn in range(tl.program_id(0) % 3 + 1):
        total += tl.exp(x - turn) * (x / x)  # planted
    tl.store(out_ptr + at, total, at < n)


@triton.jit
def as_codes(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The code of a NaN is a constant, chosen by a comparison with the NaN."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, other=1.0)
    value = x * tl.where(x == float("inf"), 0.0, 1.0)  # planted
    codes = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(out_ptr + at, tl.where(value <= float("inf"), codes, 127), at < n)


@triton.jit
def unwritten(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out_ptr + at, at < n)  # planted
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + before, at < n)


KERNELS = {
    each.fn.__name__: each
    for each in (divided, replaced, summed, multiplied, of_a_library, in_a_loop, as_codes, unwritten)
}


def launched(kernel, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Launch a kernel on COUNT float32 numbers."""
    out = torch.empty(COUNT, dtype=dtype)
    kernel[(PROGRAMS,)](x, out, COUNT, BLOCK=BLOCK)
    return out
