"""The MX GEMM of Blackwell GPUs: `torch._scaled_mm` with one power-of-two scale (E8M0) for each 32 values along k."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT, float8_kind, scaled_mm
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.scale_layouts import for_each_row, swizzled

__all__ = ["MX", "MX_BLOCK", "is_mx", "takes_mx"]

MX_BLOCK = 32
BLOCKS = ((1, MX_BLOCK), (MX_BLOCK, 1), (MX_BLOCK, MX_BLOCK))


def is_mx(quantizer: Quantizer) -> bool:
    """Whether a quantizer stores E8M0 scales for blocks of 32 values along one dim, or of 32 x 32 values."""
    return quantizer.block in BLOCKS and quantizer.stores_e8m0()


def takes_mx(a: Quantizer, b: Quantizer) -> bool:
    """Whether both operands of a GEMM are MX."""
    return float8_kind(a, b) == "blockwise" and is_mx(a) and is_mx(b)


def _lacks(problem: GemmProblem) -> str | None:
    return lacks_tensor_cores(problem) or why_not("mx", problem)


def _row_scales(operand: Quantized) -> Tensor:
    return swizzled(for_each_row(operand.scale, operand.quantizer.block[0], operand.codes.shape[0]))


def _scales(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    return _row_scales(a), _row_scales(b.t())


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    return scaled_mm(a, b, out_dtype, _scales, rows_to=ALIGNMENT, sum_to=MX_BLOCK)


MX = GemmKernel(
    name="mx",
    detail="native, MX GEMM",
    takes=takes_mx,
    lacks=_lacks,
    multiply=_multiply,
    calls=("_scaled_mm",),
    rounds_in_call=True,
)
