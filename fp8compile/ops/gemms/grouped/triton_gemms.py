"""Grouped GEMMs by this package's Triton kernel, for groups that PyTorch does not multiply on a GPU.

blockwise        a scale for each 128 values along k, or for a 128 x 128 tile
rowwise_triton   a scale for each row and column, or for each group's operand; tried after PyTorch's own
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.blockwise import BLOCK
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.grouped.grouped_blockwise_mm import grouped_blockwise_mm
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.rowwise import takes_rows
from fp8compile.ops.gemms.torch_scaled_mm import float8_kind
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["BLOCKWISE", "ROWWISE_TRITON"]


def _takes_blocks(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) == "blockwise" and a.block == (1, BLOCK) and b.block in ((BLOCK, BLOCK), (BLOCK, 1))


def _lacks_blocks(problem: GemmProblem) -> str | None:
    return lacks_tensor_cores(problem) or why_not("blockwise groups", problem)


def _lacks_rows(problem: GemmProblem) -> str | None:
    return lacks_tensor_cores(problem) or why_not("rowwise groups, ours", problem)


def _multiply(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    scales = a.quantizer.scale_values(a.scale), b.quantizer.scale_values(b.scale)
    formats: list[Any] = [each.quantizer.gemm_format() for each in (a, b)]  # which are why it was chosen
    block = BLOCK if BLOCK in a.quantizer.block else -1
    codes = a.codes.contiguous(), b.codes.contiguous()  # the op refuses others
    return grouped_blockwise_mm(*codes, *scales, offsets, *(each.name for each in formats), out_dtype, block)


BLOCKWISE = GroupedGemm(
    name="blockwise",
    detail="native, blockwise grouped GEMM in Triton",
    takes=_takes_blocks,
    lacks=_lacks_blocks,
    rows=_multiply,
    outer=_multiply,
    calls=("grouped_blockwise_mm",),
)
ROWWISE_TRITON = GroupedGemm(
    name="rowwise_triton",
    detail="native, rowwise grouped GEMM in Triton",
    takes=takes_rows,
    lacks=_lacks_rows,
    rows=_multiply,
    outer=_multiply,
    calls=("grouped_blockwise_mm",),
)
