"""fp8compile::grouped_blockwise_mm: products group by group of codes with a scale for every 128 values to be summed.

    b (E, N, K)    y_RN  = a_RK @ b_e,NK^T    each row times the matrix of its group; 0 in rows after the last group
    b (K, C)       d_eNK = a_NC @ b_KC^T      sums over the tokens of each group; 0 for a group without tokens

PyTorch has no such product. On a GPU it is a Triton kernel for Hopper; a CPU multiplies the values in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile.formats import element_format
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.kernel import product_shape
from fp8compile.ops.gemms.grouped.one_by_one import ONE_BY_ONE
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.portable import ON_GPU
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.samples import tokens
from fp8compile.quantizers import CurrentScaling, GemmConfig
from fp8compile.target import target_of

__all__ = ["grouped_blockwise_mm"]

BLOCK = 128


def _fake(*args: Any) -> Tensor:
    a, b, _, _, offsets, _, _, out_dtype = args
    return a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)


def _exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, formats: tuple[str, str],
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    blocks, run = ((BLOCK, 1), (BLOCK, 1)), ONE_BY_ONE.outer
    if b.ndim == 3:
        has_tiles = b_scale.shape[1] != b.shape[1]
        blocks, run = ((1, BLOCK), (BLOCK if has_tiles else 1, BLOCK)), ONE_BY_ONE.rows
    left, right = (
        Quantized(codes=codes, scale=scale, quantizer=CurrentScaling(format=format, block=block))
        for codes, scale, format, block in zip((a, b), (a_scale, b_scale), formats, blocks, strict=True)
    )
    return run(left, right, offsets, out_dtype, GemmConfig())


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    if target_of(a.device).type == "cpu":
        return _exact(a, b, a_scale, b_scale, offsets, (a_format, b_format), out_dtype)
    product = a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)
    if product.numel():
        from fp8compile.kernels.grouped_blockwise import multiply_rows, multiply_tokens

        formats: Any = (element_format(a_format), element_format(b_format))  # of float8
        left, right = (codes.contiguous().view(each.dtype) for codes, each in zip((a, b), formats, strict=True))
        if b.ndim == 3:
            multiply_rows(left, right, a_scale, b_scale, offsets.contiguous(), product)
        else:
            scales = a_scale.contiguous(), b_scale.contiguous()
            multiply_tokens(left, right, *scales, offsets.contiguous(), product)
    return product


def _samples() -> Iterator[tuple[Any, ...]]:
    line, tile, pillar = (CurrentScaling(block=block) for block in ((1, BLOCK), (BLOCK, BLOCK), (BLOCK, 1)))
    for x, offsets in tokens():
        rows, k = x.shape
        matrices, scale = torch.randint(0, 120, (offsets.shape[0], 20, k), dtype=torch.uint8), torch.rand(rows, 1)
        of_matrices = torch.rand(offsets.shape[0], *tile.scale_shape((20, k)))
        codes = line.cast(x, line.multiplier(line.amax(x)))
        yield codes, matrices, scale, of_matrices, offsets, "e4m3", "e5m2", torch.bfloat16
        turned = torch.randint(0, 120, (offsets.shape[0], k, 20), dtype=torch.uint8).transpose(1, 2)
        yield codes, turned, scale, torch.rand(offsets.shape[0], 20, 1), offsets, "e4m3", "e4m3", torch.float32
        codes, scale = group_quantize(x, offsets, pillar)
        yield codes, codes[: k // 2], scale, scale[:, : k // 2], offsets, "e4m3", "e4m3", torch.bfloat16


grouped_blockwise_mm: OpOverload = register_group_op(
    "fp8compile::grouped_blockwise_mm", _kernel, fake=_fake, portable=ON_GPU, samples=_samples
)
