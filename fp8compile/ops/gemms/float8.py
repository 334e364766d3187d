"""What the GEMMs of `torch._scaled_mm` share: float8 codes, padding, and the call.

A GPU wants rows of codes in multiples of 16 bytes, a row-major left and a column-major right operand. Other sizes are
padded with zeros, and the product is cut to its size.
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

ALIGNMENT = 16  # cuBLASLt: rows of codes are multiples of 16 bytes; Inductor's CPU code: for M = 1 as well


def float8_kind(a: Quantizer, b: Quantizer) -> str | None:
    """How a product of float8 codes undoes its scales, as `gemm_kind` returns it; None if codes are not float8."""
    is_float8 = a.gemm_format() is not None and b.gemm_format() is not None
    return gemm_kind(a.block, b.block) if is_float8 else None


def padded(x: Tensor, rows: int, columns: int, *, value: float = 0.0) -> Tensor:
    """Pad a matrix by so many rows and columns; returns the matrix itself if both are known to be 0."""
    if _compat.statically_equal((rows, columns), (0, 0)):
        return x
    return pad(x, (0, columns, 0, rows), value=value)


def _padded_codes(a: Quantized, b: Quantized, rows_to: int, sum_to: int) -> tuple[Tensor, Tensor]:
    """Float8 codes in the layout of `_scaled_mm`: a row-major, b column-major, sides as multiples."""
    (m, k), n = a.codes.shape, b.codes.shape[1]
    on_gpu = target_of(a.codes.device).type == "cuda"
    extra_k = -k % sum_to
    extra_n = -n % ALIGNMENT if on_gpu else 0
    extra_m = -m % rows_to if rows_to > 1 else 0
    if _compat.is_unbacked(m):
        extra_m = 2  # rows of zeros: PyTorch asks `_scaled_mm` whether it has one row, and of two more it can tell
    # statically: a guard on M % 16 would compile the backward twice, for its sum runs over tokens
    rows = padded(a.codes, extra_m, extra_k)
    columns = padded(b.codes.t(), extra_n, extra_k)
    a_format, b_format = a.quantizer.gemm_format(), b.quantizer.gemm_format()
    a_float8, b_float8 = a_format.dtype, b_format.dtype  # type: ignore[union-attr]  # which are why it was chosen
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
    """`torch._scaled_mm` of two operands, whatever their sizes.

    Args:
        a: (m, k), float8 codes.
        b: (k, n), float8 codes.
        out_dtype: Dtype of the product.
        scales: Function of the operands and the padded m and n; returns the scales in the GEMM's layout.
        rows_to: Number to whose multiple m is padded; more than 1 if each row has scales of its own.
        sum_to: Number to whose multiple k is padded.
        fast_accumulation: Whether partial sums may stay in the tensor core's fewer bits.

    Returns:
        (m, n), contiguous.
    """
    rows, columns = _padded_codes(a, b, rows_to, sum_to)
    (m, _), n = a.codes.shape, b.codes.shape[1]
    a_scale, b_scale = scales(a, b, rows.shape[0], columns.shape[1])
    product = torch._scaled_mm(rows, columns, a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    if _compat.statically_equal(product.shape, (m, n)):
        return product
    return product[:m, :n].contiguous()
