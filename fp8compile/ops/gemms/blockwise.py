"""Hopper's blockwise GEMM: `torch._scaled_mm` with scales of 128 values along k, or of 128 x 128."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT, float8_kind, padded, scaled_mm
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.scale_layouts import down_the_rows

__all__ = ["BLOCK", "BLOCKWISE", "takes_blocks"]

BLOCK = 128
# Of tiles' scales PyTorch wants rows without a gap, and cuBLAS rows that are a multiple of 16 bytes. With a sum over
# fewer values than a multiple of this one, `torch._scaled_mm` refuses what cuBLAS reads (seen on an H200).
SUM_OF_TILES = 4 * BLOCK
POWERS_OF_TWO = "Use fp8compile.recipes.blockwise(scale='pow2'), or slow emulation in float64 (emulate=True)."


def takes_blocks(a: Quantizer, b: Quantizer) -> bool:
    """Whether operands have float8 codes and a scale for each 128 values along k.

    One of the operands may have a scale for each 128 x 128 tile instead.
    """
    is_blockwise = float8_kind(a, b) == "blockwise" and a.block[1] == BLOCK
    return is_blockwise and not a.block[0] == b.block[1] == BLOCK  # at most one side has tiles


def _lacks(problem: GemmProblem) -> str | None:
    lacking = lacks_tensor_cores(problem) or why_not("blockwise", problem)
    if lacking is not None and why_not("blockwise, powers of two", problem) is None:
        return f"needs power-of-two scales for this GPU's MX GEMM. {POWERS_OF_TWO}"
    return lacking


def _has_tiles(operand: Quantized) -> bool:
    return operand.quantizer.block[0] == BLOCK


def _block_scales(operand: Quantized, rows: int, sum_to: int) -> Tensor:
    """Return block scales along the summed dim in the layout of Hopper's GEMM, padded with 1.

    ``rows`` is the padded number of rows; the summed dim is padded to a multiple of ``sum_to``.
    """
    values = operand.scale_values()
    further = -values.shape[1] % max(1, sum_to // BLOCK)  # blocks of padding
    if _has_tiles(operand):
        return padded(values, 0, further, value=1.0).contiguous()
    return down_the_rows(padded(values, rows - values.shape[0], further, value=1.0))


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    sum_to = SUM_OF_TILES if _has_tiles(a) or _has_tiles(b.t()) else ALIGNMENT

    def scales(a: Quantized, b: Quantized, m: int, n: int) -> tuple[Tensor, Tensor]:
        return _block_scales(a, m, sum_to), _block_scales(b.t(), n, sum_to).t()

    return scaled_mm(a, b, out_dtype, scales, rows_to=ALIGNMENT, sum_to=sum_to)


BLOCKWISE = GemmKernel(
    name="blockwise",
    detail="native, blockwise GEMM",
    takes=takes_blocks,
    lacks=_lacks,
    multiply=_multiply,
    calls=("_scaled_mm",),
    rounds_in_call=True,
)
