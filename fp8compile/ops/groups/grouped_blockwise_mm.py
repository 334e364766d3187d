"""fp8compile::grouped_blockwise_mm: grouped GEMMs of codes with a scale for 128 summed values, or for the whole sum.

    b is (E, N, K)    y_RN  = a_RK @ b_e,NK^T    each row times the matrix of its group; 0 in rows after the last group
    b is (K, C)       d_eNK = a_NC @ b_KC^T      sums over the tokens of each group; 0 for a group without tokens

Subscripts are sizes: R rows in E groups e, C tokens after padding. On a GPU the op is a Triton kernel, because PyTorch
lacks this GEMM on some GPUs. On a CPU it calls the CPU's GEMM for each group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile.formats import element_format
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.interface import product_shape
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.padding import TOKEN_ALIGNMENT, padded_length
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.samples import tokens
from fp8compile.quantizers import CurrentScaling, GemmConfig
from fp8compile.target import target_of

__all__ = ["grouped_blockwise_mm"]

BLOCK = 128


def _fake(*args: Any) -> Tensor:
    a, b, _, _, offsets, _, _, out_dtype, *_ = args
    return a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)


def _exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, formats: tuple[str, str],
    out_dtype: torch.dtype, block: int,
) -> Tensor:  # fmt: skip
    blocks, run = ((block, 1), (block, 1)), ONE_BY_ONE.outer
    if b.ndim == 3:
        has_tiles = b_scale.shape[1] != b.shape[1]
        blocks, run = ((1, block), (block if has_tiles else 1, block)), ONE_BY_ONE.rows
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
    block: int = BLOCK,
) -> Tensor:
    is_whole = block == -1
    if is_whole:  # the scale of a group's operand is that of each of its rows
        a_scale = a_scale.expand(-1, a_scale.shape[1] if b.ndim == 3 else a.shape[0])
        b_scale = b_scale.expand(-1, b.shape[1], -1) if b.ndim == 3 else b_scale.expand(-1, b.shape[0])
    if target_of(a.device).type == "cpu":
        return _exact(a, b, a_scale, b_scale, offsets, (a_format, b_format), out_dtype, block)
    product = a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)
    if product.numel():
        from fp8compile.kernels.grouped_blockwise_mm import multiply_rows, multiply_tokens

        formats: Any = (element_format(a_format), element_format(b_format))  # of float8
        left, right = (codes.contiguous().view(each.dtype) for codes, each in zip((a, b), formats, strict=True))
        if b.ndim == 3:
            multiply_rows(left, right, a_scale, b_scale, offsets.contiguous(), product, is_whole=is_whole)
        else:
            align = TOKEN_ALIGNMENT if is_whole else BLOCK
            multiply_tokens(
                left, right, a_scale, b_scale, offsets.contiguous(), product, align=align, is_whole=is_whole
            )
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
        groups, whole = offsets.shape[0], ("e5m2", "e4m3", torch.bfloat16, -1)
        codes = torch.randint(0, 120, (rows, k), dtype=torch.uint8)
        yield codes, matrices, torch.rand(rows, 1), torch.rand(groups, 20, 1), offsets, *whole
        columns = padded_length(rows, groups, TOKEN_ALIGNMENT)
        codes = torch.randint(0, 120, (k, columns), dtype=torch.uint8)
        yield codes, codes[:8], torch.rand(groups, k), torch.rand(groups, 1), offsets, *whole


grouped_blockwise_mm: OpOverload = register_group_op(
    "fp8compile::grouped_blockwise_mm", _kernel, fake=_fake, portable=ON_GPU, samples=_samples
)
