"""The GEMM for rowwise operands on a GPU without a rowwise kernel.

`torch._scaled_mm` multiplies the codes without scales, in float32, and then the product is multiplied by both scales.
It is rounded to float32 three times, for the sum and for each scale, before it is rounded to the output's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores
from fp8compile.ops.gemms.interface import GemmKernel
from fp8compile.ops.gemms.torch_scaled_mm import float8_kind, scaled_mm
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["SCALED_AFTER"]


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) == "rowwise"


def _ones(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    one = torch.ones((), device=a.codes.device)
    return one, one


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = scaled_mm(a, b, torch.float32, _ones, fast_accumulation=config.fast_accumulation)
    return (product * a.scale_values() * b.scale_values()).to(out_dtype)


SCALED_AFTER = GemmKernel(
    name="scaled_after",
    detail="native, scales applied after the GEMM",
    takes=_takes,
    lacks=lacks_tensor_cores,
    multiply=_multiply,
    calls=("_scaled_mm",),
)
