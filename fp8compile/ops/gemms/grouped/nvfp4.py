"""Blackwell's grouped NVFP4 GEMM: four-bit codes, e4m3 scales of 16 values, float32 scales of groups.

`fp8compile.ops.groups.group_quantize_two_levels` makes the codes of tokens, with scales in tiles. The codes and scales
of matrices are put into the GEMM's layout here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import pack
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import why_not
from fp8compile.ops.gemms.grouped.grouped_nvfp4_mm import grouped_nvfp4_mm
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.grouped.torch_scaled_grouped_mm import padded_features
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.nvfp4 import NVFP4 as UNGROUPED
from fp8compile.ops.gemms.nvfp4 import SUM_TO
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.ops.groups.four_bit_tiles import tile_ends
from fp8compile.ops.groups.padding import zero_behind
from fp8compile.quantizers import GemmConfig
from fp8compile.scale_layouts import for_each_row, tiled

__all__ = ["NVFP4"]


def _lacks(problem: GemmProblem) -> str | None:
    return why_not("nvfp4 groups", problem)


def _packed(operand: Quantized) -> str:
    """Return how an operand's codes are packed in pairs: ``"rows"``, ``"columns"`` or ``"none"``."""
    quantizer: Any = operand.quantizer  # TwoLevelScaling
    return quantizer.packed


def _check_laid_out(operand: Quantized, *packed: str) -> None:
    if _packed(operand) not in packed:
        raise ValueError(
            f"fp8compile::scaled_grouped_mm: data quantized by {operand.quantizer!r} is not packed as the GPU "
            "requires. Quantize tokens with fp8compile::group_quantize_two_levels, which lays out scales in tiles; "
            "store values of matrices one per byte, or two per byte along the dim that is summed."
        )


def _codes_of_matrices(operand: Quantized) -> Tensor:
    """Return the codes of E stacked matrices as (E, N, K / 2), packed along rows and padded with zeros."""
    if _packed(operand) == "rows":
        return padded_features(operand.codes, (ALIGNMENT, SUM_TO // 2)).contiguous()
    return pack(padded_features(operand.codes, (ALIGNMENT, SUM_TO)), -1).contiguous()


def _scales_of_matrices(operand: Quantized) -> Tensor:
    """Put scales of E matrices into 128 x 4 tiles, (E, bytes); a 16 x 16 block's scale is repeated for its rows."""
    return tiled(for_each_row(operand.scale, operand.quantizer.block[0], operand.codes.shape[1])).flatten(1)


def _rows(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    _check_laid_out(a, "rows")
    _check_laid_out(b, "rows", "none")
    scales = a.scale, _scales_of_matrices(b), a.outer_scale, b.outer_scale
    product = grouped_nvfp4_mm(a.codes, _codes_of_matrices(b), *scales, offsets, out_dtype)
    return zero_behind(product[:, : b.codes.shape[1]], offsets)


def _outer(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    for each in (a, b):
        _check_laid_out(each, "columns")
    codes = (padded_features(each.codes, (ALIGNMENT, 1)) for each in (a, b))
    scales = a.scale, b.scale, a.outer_scale, b.outer_scale
    product = grouped_nvfp4_mm(*codes, *scales, tile_ends(offsets), out_dtype)
    return product[:, : a.codes.shape[0], : b.codes.shape[0]]


NVFP4 = GroupedGemm(
    name="nvfp4",
    detail="native, NVFP4 grouped GEMM",
    takes=UNGROUPED.takes,
    lacks=_lacks,
    rows=_rows,
    outer=_outer,
    calls=("grouped_nvfp4_mm",),
)
