"""fp8compile::scaled_mm: the product of two quantized matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.selection import multiply, selected_gemm
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.quantizers.check_returned import shape_said

__all__ = ["as_sides", "multiply_operands", "outer_scales_of", "scaled_mm"]


def as_sides(
    codes: tuple[Any, ...], scales: tuple[Any, ...], quantizers: tuple[Any, ...], outer_scales: tuple[Any, ...]
) -> list[Quantized]:
    """Make the left and the right `Quantized` operand of a product.

    Each argument is a tuple with an entry for the left and for the right operand; an outer scale may be None.
    """
    parts = zip(codes, scales, quantizers, outer_scales, strict=True)
    return [Quantized(codes=c, scale=s, quantizer=q, outer_scale=o) for c, s, q, o in parts]


def outer_scales_of(a: Quantized, b: Quantized) -> tuple[Tensor | None, ...]:
    """Return the outer scales of both operands as the last arguments of a product's op; () if neither has one."""
    return () if a.outer_scale is None and b.outer_scale is None else (a.outer_scale, b.outer_scale)


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_quantizer: Quantizer,
    b_quantizer: Quantizer,
    out_dtype: torch.dtype,
    config: GemmConfig,
    a_outer_scale: Tensor | None = None,
    b_outer_scale: Tensor | None = None,
) -> Tensor:
    sides = as_sides((a, b), (a_scale, b_scale), (a_quantizer, b_quantizer), (a_outer_scale, b_outer_scale))
    left, right = sides
    return multiply(left, right, out_dtype, config)


def _fake(*args: Any) -> Tensor:
    a, b, _, _, a_quantizer, b_quantizer, out_dtype, *_ = args
    m, k = shape_said(a_quantizer, "values_shape", a.shape)
    other_k, n = shape_said(b_quantizer, "values_shape", b.shape)
    torch._check(k == other_k, lambda: f"scaled_mm: inner sizes must be equal, got ({m}, {k}) by ({other_k}, {n}).")
    return a.new_empty((m, n), dtype=out_dtype)


def _decompose(*args: Any) -> Tensor:
    product = _kernel(*args)
    a, _, _, _, a_quantizer, b_quantizer, out_dtype, config, *_ = args
    if selected_gemm(a_quantizer, b_quantizer, a.device, out_dtype, config).rounds_in_call:
        return product
    return rounded(product).to(out_dtype)  # Inductor would drop the product's rounding when it fuses a reader


def _sharding(*args: Any) -> list[Split]:
    _, _, _, _, a_quantizer, b_quantizer, *others = args
    (a_cut, a_grid), (b_cut, b_grid) = _outer_cut(0, a_quantizer.block[0]), _outer_cut(1, b_quantizer.block[1])
    whole = (None,) * (2 + len(others))
    return [
        Split((a_cut, None, a_grid, None, *whole), (0,), exact=False),
        Split((None, b_cut, None, b_grid, *whole), (1,), exact=False),
    ]


def _outer_cut(dim: int, block: int) -> tuple[Cut, Cut | None]:
    return (Cut(dim), None) if block == -1 else (Cut(dim, block), Cut(dim))


scaled_mm: OpOverload = register_op(
    "fp8compile::scaled_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=_sharding,
)


def multiply_operands(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """Call the op `scaled_mm` with the codes and scales of two `Quantized` operands, (m, k) and (k, n)."""
    outer = outer_scales_of(a, b)
    return scaled_mm(a.codes, b.codes, a.scale, b.scale, a.quantizer, b.quantizer, out_dtype, config, *outer)
