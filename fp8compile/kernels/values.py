"""How kernels read their matrix and write what lies like it: two lines that generated code replaces.

Where Inductor makes the matrix, it makes a template of the kernel's source: `values` becomes the code that computes
these elements, `write` the store of the template's output (`fp8compile.inductor.TileKernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["values", "write"]


@triton.jit
def values(x_ptr, m, k, is_inside, stride_m, stride_k):
    """Elements of a matrix in float32, 0 where there is none; rows (T, 1), int64, and columns (1, T)."""
    return tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)


@triton.jit
def write(codes_ptr, m, k, codes, is_inside, stride):
    """Store codes in rows of ``stride``."""
    tl.store(codes_ptr + m * stride + k, codes, is_inside)
