"""Checks, padding and calls of `torch._scaled_grouped_mm`, which several grouped GEMMs share.

A GPU needs rows of codes that are multiples of 16 bytes. Other sizes are padded with zeros along features, and the
padding is cut off the product. Tokens are not padded here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.formats import E4M3
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.gpu_support import lacks_tensor_cores, why_not
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.ops.groups.padding import zero_behind, zero_where_empty

__all__ = ["lacks_grouped", "padded_features", "scaled_outer", "scaled_rows"]


def lacks_grouped(product: str, problem: GemmProblem) -> str | None:
    """Return why a device can't run a grouped product, a key of ``PRODUCTS``; None if it can.

    The reason is the end of an error text.
    """
    if (lacking := lacks_tensor_cores(problem) or why_not(product, problem)) is not None:
        return lacking
    if {problem.a.gemm_format(), problem.b.gemm_format()} != {E4M3}:
        return "has no grouped GEMM: it only supports e4m3 by e4m3. Use e4m3 for gradients too (grad_format='e4m3')."
    return None


def padded_features(codes: Tensor, multiples: tuple[int, ...], *, value: float = 0) -> Tensor:
    """Pad the last dims of ``codes`` with ``value``, each to a multiple of its number in ``multiples``."""
    missing = [-size % multiple for size, multiple in zip(codes.shape[-len(multiples) :], multiples, strict=True)]
    if _compat.statically_equal(missing, (0,) * len(missing)):
        return codes
    return pad(codes, [edge for each in reversed(missing) for edge in (0, each)], value=value)


def _float8(operand: Quantized, multiples: tuple[int, ...]) -> Tensor:
    stored: Any = operand.quantizer.gemm_format()  # which is why it is here
    return padded_features(operand.codes, multiples).contiguous().view(stored.dtype)


def scaled_rows(
    a: Quantized,
    b: Quantized,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    *,
    sum_to: int = ALIGNMENT,
    fast_accumulation: bool = False,
) -> Tensor:
    """Multiply each of R rows of ``a`` by its group's transposed matrix in ``b``: (R, K) by (E, N, K) to (R, N).

    Codes are float8, and scales are in the GEMM's layout, with N padded to a multiple of 16. K is padded to a multiple
    of ``sum_to``. ``offsets`` are the ends of the groups; rows after the last group get zeros.

    With ``fast_accumulation``, partial sums may stay in the tensor core, which has fewer bits than float32.
    """
    product = torch.ops.aten._scaled_grouped_mm(
        _float8(a, (sum_to,)),
        _float8(b, (ALIGNMENT, sum_to)).transpose(-2, -1),
        a_scale,
        b_scale,
        offsets,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return zero_behind(product[:, : b.codes.shape[1]], offsets)


def scaled_outer(
    a: Quantized,
    b: Quantized,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> Tensor:
    """Multiply ``a`` by the transpose of ``b`` for each of E groups of tokens: (N, C) by (K, C) to (E, N, K).

    Each product sums over its group's tokens; a group without tokens gets zeros. ``ends`` are the ends of the groups
    among the C columns. Codes are float8, and scales are in the GEMM's layout, with N and K padded to multiples of 16.

    With ``fast_accumulation``, partial sums may stay in the tensor core, which has fewer bits than float32.
    """
    product = torch.ops.aten._scaled_grouped_mm(
        _float8(a, (ALIGNMENT, 1)),
        _float8(b, (ALIGNMENT, 1)).t(),
        a_scale,
        b_scale,
        ends,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )
    return zero_where_empty(product[:, : a.codes.shape[0], : b.codes.shape[0]], ends)
