"""Rowwise operands on a GPU without a GEMM for them: `torch._scaled_mm` in float32 without scales, then both scales.

That is three roundings to float32, the sum's and one a scale, before the one to the dtype of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.float8 import float8_kind, scaled_mm
from fp8compile.ops.gemms.gates import lacks_tensor_cores
from fp8compile.ops.gemms.kernel import GemmKernel
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
