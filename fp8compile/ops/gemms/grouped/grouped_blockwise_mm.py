"""fp8compile::grouped_blockwise_mm: grouped GEMMs of codes with a scale for 128 summed values, or for the whole sum.

    b is (E, N, K)    y_RN  = a_RK @ b_e,NK^T    each row times the matrix of its group; 0 in rows after the last group
    b is (K, C)       d_eNK = a_NC @ b_KC^T      sums over the tokens of each group; 0 for a group without tokens

Subscripts are sizes: R rows in E groups e, C tokens after padding. Codes are contiguous; others raise a ValueError,
because a copy inside of the op would be seen by no count of bytes. On a GPU the op is a Triton kernel, because PyTorch
lacks this GEMM on some GPUs. On a CPU it calls the CPU's GEMM for each group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.by_launch import by_launch
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.interface import product_shape
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.padding import TOKEN_ALIGNMENT
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import CurrentScaling, GemmConfig

__all__ = ["grouped_blockwise_mm"]

BLOCK = 128
STRIDED = (2, 3)  # the scales


def _fake(*args: Any) -> Tensor:
    a, b, _, _, offsets, _, _, out_dtype, *_ = args
    return a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)


def _exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, a_format: str, b_format: str,
    out_dtype: torch.dtype, block: int = BLOCK,
) -> Tensor:  # fmt: skip
    if block == -1:  # the scale of a group's operand is that of each of its rows
        a_scale = a_scale.expand(-1, a_scale.shape[1] if b.ndim == 3 else a.shape[0])
        b_scale = b_scale.expand(-1, b.shape[1], -1) if b.ndim == 3 else b_scale.expand(-1, b.shape[0])
    blocks, run = ((block, 1), (block, 1)), ONE_BY_ONE.outer
    if b.ndim == 3:
        has_tiles = b_scale.shape[1] != b.shape[1]
        blocks, run = ((1, block), (block if has_tiles else 1, block)), ONE_BY_ONE.rows
    left, right = (
        Quantized(codes=codes, scale=scale, quantizer=CurrentScaling(format=format, block=block))
        for codes, scale, format, block in zip((a, b), (a_scale, b_scale), (a_format, b_format), blocks, strict=True)
    )
    return run(left, right, offsets, out_dtype, GemmConfig())


def _launch(
    results: tuple[Tensor, ...], a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor,
    a_format: str, b_format: str, out_dtype: torch.dtype, block: int = BLOCK,
) -> Any:  # fmt: skip
    from fp8compile.kernels.grouped_blockwise_mm import multiply_rows, multiply_tokens

    operands, formats = (a, b, a_scale, b_scale, offsets, *results), (a_format == "e4m3", b_format == "e4m3")
    is_whole = block == -1
    if b.ndim == 3:
        return multiply_rows(*operands, formats=formats, is_whole=is_whole)
    align = TOKEN_ALIGNMENT if is_whole else BLOCK
    return multiply_tokens(*operands, formats=formats, align=align, is_whole=is_whole)


_launched = by_launch(_exact, fake=_fake, launch=_launch, strided=STRIDED)


def _kernel(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, a_format: str, b_format: str,
    out_dtype: torch.dtype, block: int = BLOCK,
) -> Tensor:  # fmt: skip
    for name, codes in (("a", a), ("b", b)):
        if not codes.is_contiguous():
            raise ValueError(
                f"fp8compile::grouped_blockwise_mm: {name} has shape {tuple(codes.shape)} and strides "
                f"{codes.stride()}, but it must be contiguous. Pass {name}.contiguous()."
            )
    found: Tensor = _launched(a, b, a_scale, b_scale, offsets, a_format, b_format, out_dtype, block)
    return found


grouped_blockwise_mm: OpOverload = register_op(
    "fp8compile::grouped_blockwise_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,
    portable=ON_GPU,
    sharding=None,
)
inductor.register_launch(grouped_blockwise_mm, _launch, strided=STRIDED)
