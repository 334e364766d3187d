"""Two GEMMs for rowwise scales: `torch._scaled_mm` applies the scales, or ``scaled_after`` scales its product.

On a CPU, a tensorwise scale is repeated for each row. With one scale, oneDNN multiplies e4m3 by e4m3 in a slow
reference loop, to the same bits (`benchmarks/cpu_gemm.py`). PyTorch before 2.13 has only this loop, so fp8compile
emulates there.

``scaled_after`` is for GPUs without a rowwise kernel for the output's dtype. It rounds to float32 three times, for the
sum and for each scale, before it rounds to the output's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.torch_scaled_mm import float8_kind, padded, scaled_mm
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["ROWWISE", "SCALED_AFTER", "takes_rows"]


def takes_rows(a: Quantizer, b: Quantizer) -> bool:
    """Whether operands (m, k) and (k, n) have one scale each, or a scale for each row and column."""
    return float8_kind(a, b) in ("tensorwise", "rowwise")


def _lacks(problem: GemmProblem) -> str | None:
    if problem.target.type == "cpu":
        return None if _compat.cpu_has_rowwise_gemm() else "needs PyTorch 2.13 on a CPU."
    return lacks_tensor_cores(problem) or why_not("rowwise", problem)


def _row_scales(operand: Quantized, rows: int) -> Tensor:
    """Return one scale for each row, (rows, 1): a single scale is repeated, and padding rows get 1."""
    m, scale = operand.codes.shape[0], operand.quantizer.scale_values(operand.scale)
    if not _compat.statically_equal(scale.stride(), (1, 1)):
        scale = scale.reshape(-1).unsqueeze(1)  # a transposed (1, m) scale has strides that `_scaled_mm` refuses
    if operand.quantizer.block[0] != 1:
        scale = scale.expand(m, 1)
    return padded(scale, rows - m, 0, value=1.0).contiguous()


def _scales(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    return _row_scales(a, m), _row_scales(b.t(), n).t()


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    return scaled_mm(a, b, out_dtype, _scales, fast_accumulation=config.fast_accumulation)


ROWWISE = GemmKernel(
    name="rowwise",
    detail="native, rowwise GEMM",
    takes=takes_rows,
    lacks=_lacks,
    multiply=_multiply,
    calls=("_scaled_mm",),
    rounds_in_call=True,
)

# ---------------------------------------------------------------------------------- scales after the product


def _takes_after(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) == "rowwise"


def _ones(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    one = torch.ones((), device=a.codes.device)
    return one, one


def _multiply_after(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = scaled_mm(a, b, torch.float32, _ones, fast_accumulation=config.fast_accumulation)
    return (product * a.scale_values() * b.scale_values()).to(out_dtype)


SCALED_AFTER = GemmKernel(
    name="scaled_after",
    detail="native, scales applied after the GEMM",
    takes=_takes_after,
    lacks=lacks_tensor_cores,
    multiply=_multiply_after,
    calls=("_scaled_mm",),
)
