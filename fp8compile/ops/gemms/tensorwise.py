"""The tensorwise GEMM on a GPU: `torch._scaled_mm` with one scale for each operand."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores
from fp8compile.ops.gemms.interface import GemmKernel
from fp8compile.ops.gemms.torch_scaled_mm import float8_kind, scaled_mm
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["TENSORWISE"]


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) == "tensorwise"


def _scales(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    return a.scale_values().reshape(()), b.scale_values().reshape(())


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    return scaled_mm(a, b, out_dtype, _scales, fast_accumulation=config.fast_accumulation)


TENSORWISE = GemmKernel(
    name="tensorwise",
    detail="native, tensorwise GEMM",
    takes=_takes,
    lacks=lacks_tensor_cores,
    multiply=_multiply,
    calls=("_scaled_mm",),
    rounds_in_call=True,
)
