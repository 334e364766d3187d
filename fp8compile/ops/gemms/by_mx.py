"""MX GEMMs for codes that lack MX's scales, one power of two for each 32 values along k.

blockwise_by_mx   blocks of 128: the exponent of a scale is repeated for each 32 values; scales are powers of two
scaled_by_mx      one scale a row or a tensor: MX multiplies with scales of 1; the scales then multiply the product

`blockwise_by_mx` is the only GEMM for blocks of 128 from compute capability 10.0 on. `scaled_by_mx` is an option of a
recipe for GeForce cards of 12.0, whose tensor cores sum plain FP8 products in float32 at half the rate of MX products.
A scale of 1 changes no bit of the sum (github.com/triton-lang/triton/pull/11320).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.formats import FLOAT32_MANTISSA_BITS
from fp8compile.inductor import constant
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.blockwise import BLOCK, takes_blocks
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.mx import MX_BLOCK
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT, float8_kind, scaled_mm
from fp8compile.ops.inductor_hints import realize
from fp8compile.quantizers import CurrentScaling, GemmConfig, Quantizer
from fp8compile.scale_layouts import for_each_row, swizzled, tiles_numel

__all__ = ["BLOCKWISE_BY_MX", "SCALED_BY_MX", "may_run_by_mx"]

ONE = 127  # the E8M0 byte of 2**0


def _has_powers_of_two(quantizer: Quantizer) -> bool:
    return quantizer.stores_e8m0() or (isinstance(quantizer, CurrentScaling) and quantizer.scale == "pow2")


def _takes_blocks(a: Quantizer, b: Quantizer) -> bool:
    return takes_blocks(a, b) and _has_powers_of_two(a) and _has_powers_of_two(b)


def _takes_rows(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) in ("tensorwise", "rowwise")


def may_run_by_mx(a: Quantizer, b: Quantizer, config: GemmConfig) -> bool:
    """Whether a GEMM of this file takes the codes of quantizers ``a`` and ``b``, if the GPU has MX GEMMs.

    `scaled_by_mx` is considered only if ``config.by_mx`` is set.
    """
    return _takes_blocks(a, b) or (config.by_mx and _takes_rows(a, b))


def _lacks_blocks(problem: GemmProblem) -> str | None:
    return lacks_tensor_cores(problem) or why_not("blockwise, powers of two", problem)


def _lacks_rows(problem: GemmProblem) -> str | None:
    lacking = lacks_tensor_cores(problem) or why_not("scaled by MX", problem)
    return lacking or (None if problem.config.by_mx else "uses the MX GEMM only if the recipe has by_mx=True.")


def _exponents(operand: Quantized) -> Tensor:
    """Return block scales as E8M0 bytes: the exponent bits of the float32 scales, 255 for NaN."""
    if operand.quantizer.stores_e8m0():
        return operand.scale
    # multipliers end at 2**127, so scales begin at 2**-127, which is byte 0 and the largest subnormal power of two
    return (operand.scale.contiguous().view(torch.int32) >> FLOAT32_MANTISSA_BITS).to(torch.uint8)


def _block_scales(operand: Quantized) -> Tensor:
    """Return scales as E8M0 bytes, one for each row and 32 values; a scale of 128 values is repeated.

    The layout is the MX GEMM's, tiles of 128 x 4 (`fp8compile.scale_layouts`).
    """
    rows, k = operand.codes.shape
    along = _exponents(operand).repeat_interleave(BLOCK // MX_BLOCK, 1)[:, : -(-k // MX_BLOCK)]
    return swizzled(for_each_row(along, operand.quantizer.block[0], rows))


def _scales(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    return _block_scales(a), _block_scales(b.t())


def _ones(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
    blocks = (a.codes.shape[1] + MX_BLOCK - 1) // MX_BLOCK
    left, right = (constant(ONE, torch.uint8, a.codes, (tiles_numel(rows, blocks),)) for rows in (m, n))
    # `realize`, because Inductor would fold the view into a constant of a dtype for which it has no kernel
    return realize(left).view(torch.float8_e8m0fnu), realize(right).view(torch.float8_e8m0fnu)


def _multiply_blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    return scaled_mm(a, b, out_dtype, _scales, rows_to=ALIGNMENT, sum_to=MX_BLOCK)


def _multiply_rows(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = scaled_mm(a, b, torch.float32, _ones, rows_to=ALIGNMENT, sum_to=MX_BLOCK)
    return (product * a.scale_values() * b.scale_values()).to(out_dtype)


BLOCKWISE_BY_MX = GemmKernel(
    name="blockwise_by_mx",
    detail="native, MX GEMM, each scale repeated for four blocks of 32",
    takes=_takes_blocks,
    lacks=_lacks_blocks,
    multiply=_multiply_blocks,
    calls=("_scaled_mm",),
    rounds_in_call=True,
)
SCALED_BY_MX = GemmKernel(
    name="scaled_by_mx",
    detail="native, MX GEMM with scales of 1, scales applied after it",
    takes=_takes_rows,
    lacks=_lacks_rows,
    multiply=_multiply_rows,
    calls=("_scaled_mm",),
)
