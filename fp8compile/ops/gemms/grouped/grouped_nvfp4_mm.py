"""fp8compile::grouped_nvfp4_mm: GEMMs of four-bit codes, group by group, on Blackwell's tensor cores.

    b is (E, N, K / 2)    y_RN  = a_RK @ b_e,NK^T    each row times the matrix of its group
    b is (K, C / 2)       d_eNK = a_NC @ b_KC^T      sums over the columns of each group

Subscripts are sizes: R rows in E groups e, C tokens after padding. The op calls `torch._scaled_grouped_mm_v2`, which
has no Inductor lowering, so the op stays one call in graphs. On a CPU it multiplies the same operands exactly, for
tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.formats import E4M3
from fp8compile.ops.gemms.grouped.interface import product_shape
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.nvfp4_mm import BLOCK_1X16, NO_SWIZZLE, NV_BLOCK, SWIZZLE_32_4_4, TENSOR_WISE, values_of_tiles
from fp8compile.ops.registry import register_op
from fp8compile.scale_layouts import tiles_numel
from fp8compile.target import target_of

__all__ = ["grouped_nvfp4_mm"]

MOST_GROUPS = 1024  # PyTorch prepares all groups in one thread block, of at most 1024 threads


def _groups_of(codes: Tensor, tiles: Tensor, offsets: Tensor, *, over_tokens: bool) -> Iterator[Tensor]:
    """Yield each group's decoded rows, or columns if ``over_tokens``; ``tiles`` has the scales, group after group."""
    flat, start, at = tiles.contiguous().view(-1), 0, 0
    for end in offsets.tolist():
        own = codes[:, start // 2 : end // 2] if over_tokens else codes[start:end]
        size = tiles_numel(own.shape[0], own.shape[1] * 2 // NV_BLOCK)
        yield values_of_tiles(own, flat[at : at + size])
        start, at = end, at + size


def _exact(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], outer_scales: tuple[Tensor, Tensor], offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    product = a.new_zeros(product_shape(a, b, offsets), dtype=out_dtype)
    outer = outer_scales[0].double() * outer_scales[1].double()
    left = _groups_of(a, scales[0], offsets, over_tokens=b.ndim == 2)
    if b.ndim == 2:
        for group, sides in enumerate(zip(left, _groups_of(b, scales[1], offsets, over_tokens=True), strict=True)):
            product[group] = ((sides[0] @ sides[1].t()) * outer[group]).to(out_dtype)
        return product
    start = 0
    for group, (rows, end) in enumerate(zip(left, offsets.tolist(), strict=True)):
        product[start:end] = ((rows @ values_of_tiles(b[group], scales[1][group]).t()) * outer[group]).to(out_dtype)
        start = end
    return product


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_outer_scale: Tensor,
    b_outer_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply four-bit codes group by group, for E groups; a GPU leaves rows after the last group unwritten.

    Args:
        a: (R, K / 2) uint8, two codes of a row in a byte, K a multiple of 32; or (N, C / 2), with C tokens after
            padding.
        b: (E, N, K / 2) uint8, N a multiple of 16; or (K, C / 2), K a multiple of 16.
        a_scale: Bytes of e4m3 scales for 1 x 16 codes, in 128 x 4 tiles. For a (R, K / 2): (rows rounded up to tiles,
            blocks of a row rounded up to 4), where each group begins a new tile. For a (N, C / 2): (N rounded up to
            tiles, C / 16), where the tiles of a group are contiguous.
        b_scale: Bytes of b's scales: (E, bytes of a matrix's tiles), or (K rounded up to tiles, C / 16).
        a_outer_scale: (E,) float32.
        b_outer_scale: (E,) float32.
        offsets: Ends of the groups, (E,) int32: among the rows, or among C columns, where each group has whole tiles.
        out_dtype: Dtype of the product; bfloat16 on a GPU.
    """
    scales, outer_scales = (a_scale, b_scale), (a_outer_scale, b_outer_scale)
    if target_of(a.device).type == "cpu":
        return _exact(a, b, scales, outer_scales, offsets, out_dtype)
    if offsets.shape[0] > MOST_GROUPS:
        raise ValueError(
            f"fp8compile::grouped_nvfp4_mm: there are {offsets.shape[0]} groups, but a GPU supports at most "
            f"{MOST_GROUPS} per call. Split the experts of the layer."
        )
    four = torch.float4_e2m1fn_x2
    kinds, order = [BLOCK_1X16, TENSOR_WISE], [SWIZZLE_32_4_4, NO_SWIZZLE]
    left, right = (
        [scale.contiguous().view(E4M3.dtype), outer] for scale, outer in zip(scales, outer_scales, strict=True)
    )
    codes = a.contiguous().view(four), b.contiguous().view(four).transpose(-2, -1)
    return torch.ops.aten._scaled_grouped_mm_v2(
        *codes, left, kinds, order, right, kinds, order, offsets.contiguous(), None, out_dtype
    )


def _fake(*args: Any) -> Tensor:
    a, b, *_, offsets, out_dtype = args
    return a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)


grouped_nvfp4_mm: OpOverload = register_op(
    "fp8compile::grouped_nvfp4_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,  # one call on every device
    portable=ON_GPU,
    sharding=None,  # operands are laid out for one GPU
)
inductor.register_fallback(grouped_nvfp4_mm, contiguous=-1)
