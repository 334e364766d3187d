"""fp8compile::nvfp4_mm: the product of four-bit codes on Blackwell's tensor cores.

The op calls `torch._scaled_mm_v2` once. In graphs the op stays one call, because Inductor (up to PyTorch 2.13) can't
lower that function if scales are in tiles. On a CPU the op multiplies the same operands exactly, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.formats import E2M1, E4M3, unpack
from fp8compile.ops.registry import register_op
from fp8compile.scale_layouts import untiled
from fp8compile.target import target_of

__all__ = ["NV_BLOCK", "nvfp4_mm", "values_of_tiles"]

NV_BLOCK = 16
# values of torch.nn.functional.ScalingType and SwizzleType as numbers, because the ATen operator takes numbers
TENSOR_WISE, BLOCK_1X16, NO_SWIZZLE, SWIZZLE_32_4_4 = 0, 2, 0, 1


def values_of_tiles(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode packed codes (rows, k / 2), with e4m3 scales in 128 x 4 tiles, to values (rows, k), float64."""
    numbers = E2M1.decode(unpack(codes, 1)).double()
    blocks = untiled(scale, numbers.shape[0], numbers.shape[1] // NV_BLOCK)
    return numbers * E4M3.decode(blocks).double().repeat_interleave(NV_BLOCK, 1)


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_outer_scale: Tensor,
    b_outer_scale: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply ``a``, (m, k), by the transpose of ``b``, (n, k); both are packed e2m1 codes.

    Args:
        a: (m, k / 2) uint8, two neighbours of a row per byte; m is a multiple of 16, k of 32.
        b: (n, k / 2) uint8, two neighbours of a row per byte; n is a multiple of 16.
        a_scale: e4m3 scales of blocks of 1 x 16 codes of ``a``, as bytes in tiles, 1-D, see `scale_layouts`.
        b_scale: The same scales for ``b``.
        a_outer_scale: Scale of the whole tensor ``a``, (1,) float32.
        b_outer_scale: Scale of the whole tensor ``b``, (1,) float32.
        out_dtype: Dtype of the product (m, n).
    """
    if target_of(a.device).type == "cpu":
        outer = a_outer_scale.double() * b_outer_scale.double()
        return ((values_of_tiles(a, a_scale) @ values_of_tiles(b, b_scale).t()) * outer).to(out_dtype)
    four = torch.float4_e2m1fn_x2
    kinds, order = [BLOCK_1X16, TENSOR_WISE], [SWIZZLE_32_4_4, NO_SWIZZLE]
    left, right = [a_scale.view(E4M3.dtype), a_outer_scale], [b_scale.view(E4M3.dtype), b_outer_scale]
    operands = a.contiguous().view(four), b.contiguous().view(four).t()
    return torch.ops.aten._scaled_mm_v2(*operands, left, kinds, order, right, kinds, order, None, out_dtype)


def _fake(*args: Any) -> Tensor:
    a, b, *_, out_dtype = args
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


nvfp4_mm: OpOverload = register_op(
    "fp8compile::nvfp4_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,  # one call on every device
    sharding=None,  # operands are laid out for one GPU
)
inductor.register_fallback(nvfp4_mm, contiguous=-1)
