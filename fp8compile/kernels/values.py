"""Functions by which kernels load values and store codes; Inductor's template of a kernel replaces both.

`fp8compile.inductor.tile_templates` puts code that computes the elements in place of `values`, and the store of the
template's output in place of `write`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["values", "write"]


@triton.jit
def values(x_ptr, m, k, is_inside, stride_m, stride_k):
    """Load elements at rows ``m``, (R, 1) int64, and columns ``k``, (1, C), as float32; 0 where not ``is_inside``."""
    return tl.load(x_ptr + m * stride_m + k * stride_k, is_inside, other=0.0).to(tl.float32)


@triton.jit
def write(codes_ptr, m, k, codes, is_inside, stride):
    """Store codes at rows ``m`` and columns ``k`` where ``is_inside``; rows are ``stride`` elements apart."""
    tl.store(codes_ptr + m * stride + k, codes, is_inside)
