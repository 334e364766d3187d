"""The rowwise grouped GEMM: `torch._scaled_grouped_mm` with a scale for each row and each column.

The GEMM takes tensorwise operands too: the single scale of a group is repeated for its rows and columns.

It runs with fast accumulation only. With float32 sums, PyTorch's 128x256x64 kernel keeps two sets of 128 registers a
thread, spills one of them in its main loop (SASS of torch 2.11 and 2.13: 232 STL, 171 LDL), and reaches about 95
TFLOP/s on an H200 (0.22 of bf16's speed). `fp8compile.ops.gemms.grouped.triton_gemms` sums in float32 without spills.

PyTorch's check lets it run on compute capability 10.x, but the kernel is built for 9.0 only. On other GPUs the kernel
traps, and the process loses its CUDA context. On those GPUs, `fp8compile.ops.gemms.grouped.triton_gemms` multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.grouped.torch_scaled_grouped_mm import (
    lacks_grouped,
    padded_features,
    scaled_outer,
    scaled_rows,
)
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.rowwise import takes_rows
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.ops.groups.padding import alignment, padded_offsets
from fp8compile.quantizers import GemmConfig

__all__ = ["ROWWISE"]


def _lacks(problem: GemmProblem) -> str | None:
    if (lacking := lacks_grouped("rowwise groups", problem)) is not None or problem.config.fast_accumulation:
        return lacking
    return "accumulates in float32, for which PyTorch's kernel spills registers in its main loop if groups are small."


def _feature_scales(operand: Quantized, scale: Tensor, features: int) -> Tensor:
    """Return one scale for each feature of each of E groups, (E, padded features); padding gets 1.

    ``scale`` has one entry for a group, or one for each feature of a group.
    """
    scales = operand.quantizer.scale_values(scale).expand(scale.shape[0], features)
    return padded_features(scales, (ALIGNMENT,), value=1).contiguous()


def _rows(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    rows = a.quantizer.scale_values(a.scale).squeeze(-1).contiguous()
    columns = _feature_scales(b, b.scale.squeeze(-1), b.codes.shape[1])
    return scaled_rows(a, b, rows, columns, offsets, out_dtype, fast_accumulation=config.fast_accumulation)


def _outer(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    # PyTorch wants the features of one group after those of the group before, in one dim
    scale_a, scale_b = (_feature_scales(each, each.scale, each.codes.shape[0]).view(-1) for each in (a, b))
    ends = padded_offsets(offsets, alignment(a.quantizer))
    return scaled_outer(a, b, scale_a, scale_b, ends, out_dtype, fast_accumulation=config.fast_accumulation)


ROWWISE = GroupedGemm(
    name="rowwise",
    detail="native, rowwise grouped GEMM",
    takes=takes_rows,
    lacks=_lacks,
    rows=_rows,
    outer=_outer,
    calls=("_scaled_grouped_mm",),
)
