"""Triton kernels that PyTorch misunderstands; see docs/upstream.md."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

SIZE = 1024


@triton.jit
def _load(ptr, at, mask):
    return tl.load(ptr + at, mask)


@triton.jit
def _loading_kernel(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.load(index_ptr + at, at < n)
    tl.store(out_ptr + where, tl.load(x_ptr + at, at < n), at < n)


@triton.jit
def _helped_kernel(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = _load(index_ptr, at, at < n)
    tl.store(out_ptr + where, tl.load(x_ptr + at, at < n), at < n)


def _scatter(kernel, x, index):
    out = torch.empty_like(x)
    wrap_triton(kernel)[(triton.cdiv(x.numel(), SIZE),)](x, index, out, x.numel(), BLOCK=SIZE)
    return out


@triton_op("upstream_kernels::loads", mutates_args={})
def loads(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _scatter(_loading_kernel, x, index)


@triton_op("upstream_kernels::loads_by_a_helper", mutates_args={})
def loads_by_a_helper(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _scatter(_helped_kernel, x, index)


@triton.jit
def deep_kernel(x_ptr, out_ptr, n, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in tl.static_range(DEPTH):
        at = at + (at & 1)  # uses the value twice
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


_BY_64, _BY_128 = (triton.autotune([triton.Config({"BLOCK": size})], key=[])(_double_kernel) for size in (64, 128))


def doubled_twice(x):
    outputs = torch.empty_like(x), torch.empty_like(x)
    for kernel, out in zip((_BY_64, _BY_128), outputs, strict=True):
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return outputs
