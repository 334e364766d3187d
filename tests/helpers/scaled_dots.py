"""Kernels with ``tl.dot_scaled`` for tests/testing/gpu/test_scaled_tiles.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

M, N, K = 32, 16, 64


@triton.jit
def scaled_product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, HAS_A: tl.constexpr,
    PACKED_A: tl.constexpr, PACKED_B: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The product of rows of codes (M, K) and (N, K) in each program, added to what is there."""
    program = tl.program_id(0)
    m, n, block = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // GROUP)
    in_a, in_b = tl.arange(0, K // PACKED_A), tl.arange(0, K // PACKED_B)
    a = tl.load(a_ptr + (program * M + m[:, None]) * (K // PACKED_A) + in_a[None, :])
    b = tl.load(b_ptr + n[None, :] * (K // PACKED_B) + in_b[:, None])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // GROUP) + block[None, :])
    if HAS_A:  # noqa: SIM108  # Triton compiles one of the two
        a_scale = tl.load(a_scale_ptr + (program * M + m[:, None]) * (K // GROUP) + block[None, :])
    else:
        a_scale = None
    at = out_ptr + (program * M + m[:, None]) * N + n[None, :]
    tl.store(at, tl.dot_scaled(a, a_scale, A, b, b_scale, B, acc=tl.load(at), fast_math=FAST))


@triton.jit
def packed_product(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Codes of four bits that are packed along M and N."""
    m, n, k, block = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + tl.arange(0, M // 2)[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * (N // 2) + tl.arange(0, N // 2)[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + block[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + block[None, :])
    product = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", lhs_k_pack=False, rhs_k_pack=False)
    tl.store(out_ptr + m[:, None] * N + n[None, :], product)


def multiplied(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, out: Tensor, formats: tuple[str, str],
    *, fast_math: bool = False,
) -> Tensor:  # fmt: skip
    """Add the product of ``a``, codes of rows (programs * M, K), and ``b`` (N, K) to ``out`` (programs * M, N)."""
    has_a = a_scale is not None
    packed = [2 if name == "e2m1" else 1 for name in formats]
    group = 32 if b_scale.dtype == torch.uint8 else 16
    scaled_product[(out.shape[0] // M,)](
        a, b, a_scale if has_a else b_scale, b_scale, out, A=formats[0], B=formats[1], HAS_A=has_a,
        PACKED_A=packed[0], PACKED_B=packed[1], GROUP=group, FAST=fast_math, M=M, N=N, K=K,
    )  # fmt: skip
    return out
