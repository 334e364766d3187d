"""fp8compile::scaled_grouped_mm: products of quantized tensors, group by group.

    b is (E, N, K)    y_RN  = a_RK @ b_e,NK^T    each row of a times the matrix of its group
    b is (K, C)       d_eNK = a_NC @ b_KC^T      sums over the tokens of each group

Subscripts are sizes: R rows in E groups e, C tokens after padding. Rows after the last group, and the product of a
group without tokens, are zeros in the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE, every_row
from fp8compile.ops.gemms.grouped.interface import GroupedGemm, product_shape
from fp8compile.ops.gemms.grouped.table import selected_grouped_gemm
from fp8compile.ops.gemms.scaled_mm import as_sides, outer_scales_of
from fp8compile.ops.groups.export_masks import OF_BACKWARD
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import GemmConfig, Quantizer, transposed

__all__ = ["multiply_groups", "scaled_grouped_mm"]


def _gemm(
    a: Tensor, b: Tensor, a_quantizer: Quantizer, b_quantizer: Quantizer, out_dtype: torch.dtype, config: GemmConfig
) -> GroupedGemm:
    pair = (a_quantizer, transposed(b_quantizer)) if b.ndim == 3 else (transposed(a_quantizer), b_quantizer)
    return selected_grouped_gemm(*pair, a.device, out_dtype, config)


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    a_quantizer: Quantizer,
    b_quantizer: Quantizer,
    out_dtype: torch.dtype,
    config: GemmConfig,
    a_outer_scale: Tensor | None = None,
    b_outer_scale: Tensor | None = None,
) -> Tensor:
    gemm = _gemm(a, b, a_quantizer, b_quantizer, out_dtype, config)
    left, right = as_sides((a, b), (a_scale, b_scale), (a_quantizer, b_quantizer), (a_outer_scale, b_outer_scale))
    run = gemm.rows if b.ndim == 3 else gemm.outer
    return run(left, right, offsets, out_dtype, config).contiguous()


def _fake(*args: Any) -> Tensor:
    a, b, _, _, offsets, _, _, out_dtype, *_ = args
    return a.new_empty(product_shape(a, b, offsets), dtype=out_dtype)


def _decompose(*args: Any) -> Tensor:
    a, b, _, _, _, *how = args[:9]
    # an opaque GEMM stays one call, because it reads the sizes of the groups
    return NotImplemented if _gemm(a, b, *how).is_opaque else _kernel(*args)


def _portable(*args: Any) -> Tensor:
    a, b, a_scale, b_scale, offsets, *how = args[:9]
    gemm = _gemm(a, b, *how)
    if not gemm.is_opaque:
        return _kernel(*args)
    if gemm is not ONE_BY_ONE or b.ndim == 2:
        why = OF_BACKWARD if b.ndim == 2 else f"the GEMM {gemm.name} reads the sizes of groups. Export on a CPU"
        raise RuntimeError(f"decompositions: fp8compile::scaled_grouped_mm can't be decomposed: {why}.")
    sides = as_sides((a, b), (a_scale, b_scale), tuple(how[:2]), args[9:] or (None, None))
    left, right = sides
    return every_row(left, right, offsets, *how[2:])


scaled_grouped_mm: OpOverload = register_op(
    "fp8compile::scaled_grouped_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    portable=_portable,
    sharding=None,
)
inductor.register_fallback(scaled_grouped_mm)


def multiply_groups(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """Call the op `scaled_grouped_mm` with the codes and scales of two `Quantized` operands."""
    outer = outer_scales_of(a, b)
    how = a.quantizer, b.quantizer, out_dtype, config
    return scaled_grouped_mm(a.codes, b.codes, a.scale, b.scale, offsets, *how, *outer)
