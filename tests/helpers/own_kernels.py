"""Functions that launch Triton kernels of their own, for tests/testing/gpu/test_own_kernels.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, is_inside) + tl.load(y_ptr + at, is_inside), is_inside)


@triton.jit
def unmasked_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))  # planted: no mask


@triton.jit
def running_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Planted: each program adds to what the program before it wrote."""
    program = tl.program_id(0)
    before = tl.load(out_ptr + program - 1, program > 0, other=0.0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + program, before + tl.sum(tl.load(x_ptr + at, at < n, other=0.0)))


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (32, 64)], key=["n"])
@triton.heuristics({"IS_EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def exp_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if IS_EVEN:
        tl.store(out_ptr + at, tl.exp(tl.load(x_ptr + at)))
    else:
        tl.store(out_ptr + at, tl.exp(tl.load(x_ptr + at, at < n)), at < n)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, M, N, K, TILE: tl.constexpr):
    m, n = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, K, TILE):
        k = first + tl.arange(0, TILE)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], (m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], (k[:, None] < K) & (n[None, :] < N), other=0.0)
        total += tl.dot(a, b)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def tiles_kernel(x, out, TILE: tl.constexpr):
    """Double a matrix, which the host described by tiles."""
    m, n = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    out.store([m, n], x.load([m, n]) * 2)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


def _exp(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    exp_kernel[lambda given: (triton.cdiv(x.numel(), given["BLOCK"]),)](x, out, x.numel())
    return out


@triton.jit
def biased_kernel(x_ptr, bias_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, at < n)
    tl.store(out_ptr + at, x, at < n)


def without_bias(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    biased_kernel[(triton.cdiv(x.numel(), 64),)](x, None, out, x.numel(), BLOCK=64)
    return out + y


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := _exp(x))
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return _sum(grad * y, torch.zeros_like(y))


@triton_op("fp8compile_tests::sum", mutates_args={})
def wrapped_sum(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


@torch.library.custom_op("fp8compile_tests::opaque_sum", mutates_args=())
def opaque_sum(x: Tensor, y: Tensor) -> Tensor:
    return _sum(x, y)


@opaque_sum.register_fake
def _(x, y):
    return torch.empty_like(x)


@torch.library.custom_op("fp8compile_tests::of_a_cpu", mutates_args=(), device_types="cpu")
def of_a_cpu(x: Tensor) -> Tensor:
    return x + 1


@of_a_cpu.register_fake
def _(x):
    return torch.empty_like(x)


def launched(x: Tensor, y: Tensor) -> Tensor:
    return (_sum(x * 2, y) * y).relu()


def differentiated(x: Tensor, y: Tensor) -> Tensor:
    return _Exp.apply(x.float() * 0.5).bfloat16() * y


def by_operators(x: Tensor, y: Tensor) -> Tensor:
    return opaque_sum(wrapped_sum(x, y) * 2, y) + 1


def product(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.view(10, -1), y.view(-1, 10)
    out = torch.empty(10, 10)
    product_kernel[(1, 1)](a, b, out, 10, 10, a.shape[1], TILE=16)
    return out.relu()


def described(x: Tensor, y: Tensor) -> Tensor:
    """A matrix of 10 x 20, in tiles of 8 x 8 that reach over its edges."""
    tiles, out = (x * y).view(10, 20), torch.empty(10, 20)
    given, result = (TensorDescriptor.from_tensor(each, [8, 8]) for each in (tiles, out))
    tiles_kernel[(2, 3)](given, result, TILE=8)
    return out + 1


def unmasked(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    unmasked_kernel[(4,)](x, out, BLOCK=64)
    return out + y


def running(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(4)
    running_kernel[(4,)](x, out, x.numel(), BLOCK=64)
    return out


def by_a_cpu(x: Tensor, y: Tensor) -> Tensor:
    return of_a_cpu(x) + y
