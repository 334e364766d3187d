"""The NVFP4 GEMM of Blackwell GPUs: four-bit codes, e4m3 scales for 16 values along k, a float32 scale per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.formats import pack, unpack
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import why_not
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT, padded
from fp8compile.ops.nvfp4_mm import NV_BLOCK, nvfp4_mm
from fp8compile.quantizers import GemmConfig, Quantizer, TwoLevelScaling, gemm_kind
from fp8compile.scale_layouts import for_each_row, tiled

__all__ = ["NVFP4"]

SUM_TO = 2 * ALIGNMENT  # number of codes in 16 bytes


def _takes(a: Quantizer, b: Quantizer) -> bool:
    are_ours = type(a) is type(b) is TwoLevelScaling  # a subclass may mean something else by its codes
    return are_ours and gemm_kind(a.block, b.block) == "blockwise" and a.transform() == b.transform()


def _lacks(problem: GemmProblem) -> str | None:
    return why_not("nvfp4", problem)


def _rows_of_pairs(operand: Quantized, rows_to: int) -> Tensor:
    """Return codes packed in pairs along k, (rows, k / 2); zeros pad rows to a multiple of ``rows_to``, k of 32."""
    quantizer: Any = operand.quantizer  # TwoLevelScaling
    codes, per_byte = operand.codes, 2 if quantizer.packed == "rows" else 1
    if quantizer.packed == "columns":
        codes = unpack(codes, 0)
    missing = -(codes.shape[1] * per_byte) % SUM_TO
    codes = padded(codes, 0, missing // per_byte)
    codes = pack(codes, 1) if per_byte == 1 else codes
    return padded(codes, -codes.shape[0] % rows_to, 0).contiguous()


def _tiled_scales(operand: Quantized, rows: int, codes: Tensor) -> Tensor:
    """Return one scale for each row and 16 values, in 128 x 4 tiles; ``rows`` doesn't count padding of ``codes``."""
    scale = operand.scale
    if scale.ndim == 1:
        return scale  # already in tiles, whose padding covers the padding of the codes
    scale = for_each_row(scale, operand.quantizer.block[0], rows)
    blocks = codes.shape[1] * 2 // NV_BLOCK
    return tiled(padded(scale, codes.shape[0] - rows, blocks - scale.shape[1])).reshape(-1)


def _side(operand: Quantized) -> tuple[Tensor, Tensor]:
    rows = operand.shape[0]
    codes = _rows_of_pairs(operand, ALIGNMENT)
    return codes, _tiled_scales(operand, rows, codes)


def _multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    m, n = a.shape[0], b.shape[1]
    (a_codes, a_scale), (b_codes, b_scale) = _side(a), _side(b.t())
    product = nvfp4_mm(a_codes, b_codes, a_scale, b_scale, a.outer_scale, b.outer_scale, out_dtype)
    if _compat.statically_equal(product.shape, (m, n)):
        return product
    return product[:m, :n].contiguous()


NVFP4 = GemmKernel(
    name="nvfp4",
    detail="native, NVFP4 GEMM",
    takes=_takes,
    lacks=_lacks,
    multiply=_multiply,
    calls=("nvfp4_mm",),
    rounds_in_call=True,
)
