"""Emulation: dequantizes both operands to float64, multiplies them and rounds once.

This GEMM takes the codes of every quantizer. A CPU emulates every product for which it has no kernel. A GPU emulates
only if the user asks for it (``emulate=True``); otherwise the error says why no other GEMM takes the operands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.blockwise import BLOCK
from fp8compile.ops.gemms.gpu_support import advice, lacks_tensor_cores
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.mx import MX_BLOCK
from fp8compile.ops.inductor_hints import realize
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["EMULATED"]

OWN_CODES = (
    "has no GEMM: a GPU multiplies FP8 data, but only the quantizer's own dequantize method defines what this data "
    "means. {advice} If the values are float8 numbers times the scale of their block, override gemm_format(). To "
    "add your own GEMM, use fp8compile.library.register_gemm."
)
NO_SUCH_BLOCKS = (
    f"has no GEMM on any GPU. Supported are blocks (1, {BLOCK}) by ({BLOCK}, 1) or ({BLOCK}, {BLOCK}), the reverse, "
    f"and (1, {MX_BLOCK}) by ({MX_BLOCK}, 1) or ({MX_BLOCK}, {MX_BLOCK}) with E8M0 scales. {{advice}}"
)


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return True


def _lacks(problem: GemmProblem) -> str | None:
    device = problem.target.type
    if device == "cpu" or (device == "cuda" and problem.config.emulate):
        return None
    if (lacking := lacks_tensor_cores(problem)) is not None:
        return lacking
    is_float8 = problem.a.gemm_format() is not None and problem.b.gemm_format() is not None
    return (NO_SUCH_BLOCKS if is_float8 else OWN_CODES).format(advice=advice(problem.target))


def _exact(operand: Quantized) -> Tensor:
    # `realize`, because PyTorch 2.11 drops the float32 rounding of a scale that float64 code reads next
    return operand.quantizer.dequantize(operand.codes, realize(operand.grid()), torch.float64)


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = _exact(a) @ _exact(b)
    outer = [operand.outer_scale.double() for operand in (a, b) if operand.outer_scale is not None]
    # the product of outer scales is exact in float64; so is the sum of codes times scales, which have few digits
    return (product * math.prod(outer) if outer else product).to(out_dtype)


EMULATED = GemmKernel(name="emulated", detail="emulated in float64", takes=_takes, lacks=_lacks, multiply=_multiply)
