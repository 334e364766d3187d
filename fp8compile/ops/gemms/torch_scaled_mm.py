"""Call `torch._scaled_mm` on operands of any sizes, which are zero-padded to what the device needs.

A GPU needs rows of codes that are multiples of 16 bytes, a row-major left operand and a column-major right operand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.layout.quantized import Quantized
from fp8compile.quantizers import Quantizer, gemm_kind
from fp8compile.target import target_of

__all__ = ["ALIGNMENT", "float8_kind", "padded", "scaled_mm"]

ALIGNMENT = 16  # bytes of a row of codes, for cuBLASLt; Inductor's CPU code for M = 1 needs the same multiple


def float8_kind(a: Quantizer, b: Quantizer) -> str | None:
    """Return the kind of GEMM, such as ``"rowwise"``, for operands (m, k) and (k, n); None if one isn't float8."""
    is_float8 = a.gemm_format() is not None and b.gemm_format() is not None
    return gemm_kind(a.block, b.block) if is_float8 else None


def padded(x: Tensor, rows: int, columns: int, *, value: float = 0.0) -> Tensor:
    """Append ``rows`` rows and ``columns`` columns of ``value`` to a matrix."""
    if _compat.statically_equal((rows, columns), (0, 0)):
        return x
    return pad(x, (0, columns, 0, rows), value=value)


def _padded_codes(a: Quantized, b: Quantized, rows_to: int, sum_to: int) -> tuple[Tensor, Tensor]:
    """Return zero-padded float8 codes in the layout of `_scaled_mm`: ``a`` row-major, ``b`` column-major."""
    (m, k), n = a.codes.shape, b.codes.shape[1]
    on_gpu = target_of(a.codes.device).type == "cuda"
    extra_k = -k % sum_to
    extra_n = -n % ALIGNMENT if on_gpu else 0
    extra_m = -m % rows_to if rows_to > 1 else 0
    if _compat.is_unbacked(m):
        extra_m = 2  # rows of zeros: PyTorch checks whether M is 1, and with two more rows M is surely not
    # padding is decided statically: a guard on M % 16 would compile the backward twice, because it sums over tokens
    rows = padded(a.codes, extra_m, extra_k)
    columns = padded(b.codes.t(), extra_n, extra_k)
    a_format, b_format = a.quantizer.gemm_format(), b.quantizer.gemm_format()
    a_float8, b_float8 = a_format.dtype, b_format.dtype  # type: ignore[union-attr]  # `_takes` checked both formats
    return rows.contiguous().view(a_float8), columns.contiguous().view(b_float8).t()


def scaled_mm(
    a: Quantized,
    b: Quantized,
    out_dtype: torch.dtype,
    scales: Callable[[Quantized, Quantized, int, int], tuple[Tensor, Tensor]],
    *,
    rows_to: int = 1,
    sum_to: int = ALIGNMENT,
    fast_accumulation: bool = False,
) -> Tensor:
    """Call `torch._scaled_mm` on two operands of any sizes.

    Args:
        a: (m, k), float8 codes.
        b: (k, n), float8 codes.
        out_dtype: Dtype of the product.
        scales: Takes the operands and the padded m and n; returns both scales in the GEMM's layout.
        rows_to: m is padded to a multiple of this number; more than 1 if scales are of blocks.
        sum_to: k is padded to a multiple of this number.
        fast_accumulation: Whether partial sums may stay in the tensor core, which has fewer bits than float32.

    Returns:
        The product (m, n), contiguous.
    """
    rows, columns = _padded_codes(a, b, rows_to, sum_to)
    (m, _), n = a.codes.shape, b.codes.shape[1]
    a_scale, b_scale = scales(a, b, rows.shape[0], columns.shape[1])
    product = torch._scaled_mm(rows, columns, a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    if _compat.statically_equal(product.shape, (m, n)):
        return product
    return product[:m, :n].contiguous()
