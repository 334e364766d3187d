"""Scale rules: functions that compute multipliers (1 / scale) of blocks from their amaxes.

    fp32    amax f32 --max(., eps)--> --format_max / .--> --min(., largest f32)--> multiplier f32
    pow2    the same, then the mantissa is cleared

    amax 0            multiplier 1 by fp32 and pow2, without eps; all codes are zeros by every rule
    amax NaN or inf   multiplier NaN, so the whole block becomes NaN, and the overflow is seen

Values are multiplied before they are rounded. On every backend, a division has the correctly rounded float32 quotient.
In float32, `number / tensor` in PyTorch would be a reciprocal and a product, and `/` in Triton is only accurate to
2 ulp. From PyTorch 2.13 on, `torch.addcdiv` becomes div.rn on a GPU. Other divisions are rounded from float64 (64
times slower on a consumer GPU), to the same bits, because 53 bits are at least 2 * 24 + 2.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433 (scaling by amax); OCP
Microscaling Formats 1.0, section 6.3 (e8m0_floor); Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8",
arXiv:2506.08027 (e8m0_rceil).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8compile._compat import ADDCDIV_IS_EXACT, constant, constant_when_traced, once_a_graph
from fp8compile.formats import (
    E8M0,
    FLOAT32_EXPONENT_MASK,
    FLOAT32_MANTISSA_BITS,
    FLOAT32_MAX,
    FLOAT32_NAN,
    Float4Format,
    Float8Format,
)
from fp8compile.target import target_of

__all__ = ["SCALE_RULES", "exact_quotient", "exact_root", "nan_where_not_finite"]

Rule = Callable[[Tensor, Float8Format | Float4Format, float], Tensor]

MANTISSA_MASK = (1 << FLOAT32_MANTISSA_BITS) - 1


def exact_quotient(number: float, x: Tensor) -> Tensor:
    """Compute ``number / x``, rounded to float32; ``x`` is float32 or float64.

    The result is correctly rounded if ``x`` is float32 and ``number`` a float32 number.
    """
    # whole numbers up to 2**24 are float32 numbers; to Dynamo, a number may be a symbol
    is_known = ADDCDIV_IS_EXACT and x.dtype == torch.float32 and not torch.compiler.is_dynamo_compiling()
    if is_known and number % 1 == 0 and abs(number) <= 2**24:
        return torch.addcdiv(constant(-0.0, torch.float32, x), constant(number, torch.float32, x), x)
    # the constant has as many dims as x, because a float64 scalar would leave the division in float32
    return (constant(number, torch.float64, x, (1,) * x.ndim) / x).float()


@constant_when_traced
def _is_for_cpu(device: torch.device) -> bool:
    return target_of(device).type == "cpu"


def exact_root(x: Tensor) -> Tensor:
    """The square root of a float32 tensor, correctly rounded; NaN for a value below 0.

    Eager PyTorch on a CPU takes MKL's root, which is one unit in the last place off for 0.6 % of values. On a
    CPU this function therefore computes in float64 and rounds once. A GPU's instruction rounds correctly.
    """
    return x.double().sqrt().float() if _is_for_cpu(x.device) else x.sqrt()


def _floored(amax: Tensor, eps: float) -> Tensor:
    """Return the amax, but at least eps; compared in float64, because eps is rarely a float32 number."""
    return amax.double().clamp(min=eps) if eps else amax


@once_a_graph
def _by_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def nan_where_not_finite(amax: Tensor, multiplier: Tensor) -> Tensor:
    """Replace the entries of a multiplier or scale by NaN where ``amax`` is NaN or infinite."""
    finite = amax < torch.inf  # False for NaN too; `isfinite` would take four operations
    return torch.where(finite, multiplier, _by_bits(constant(FLOAT32_NAN, torch.int32, amax)))


def _quotient(amax: Tensor, fmt: Float8Format | Float4Format, eps: float) -> Tensor:
    return exact_quotient(fmt.max, _floored(amax, eps)).clamp(max=FLOAT32_MAX)


def _one_where_empty(amax: Tensor, multiplier: Tensor, eps: float) -> Tensor:
    return multiplier if eps else torch.where(amax <= 0, constant(1.0, torch.float32, amax), multiplier)


def fp32(amax: Tensor, fmt: Float8Format | Float4Format, eps: float) -> Tensor:
    """Compute multipliers (1 / scale) by the rule ``"fp32"``: the quotient format_max / amax.

    ``eps`` replaces smaller amaxes; ``amax`` is float32, ``fmt`` the format of the codes.
    """
    return nan_where_not_finite(amax, _one_where_empty(amax, _quotient(amax, fmt, eps), eps))


def pow2(amax: Tensor, fmt: Float8Format | Float4Format, eps: float) -> Tensor:
    """Compute multipliers (1 / scale) by ``"pow2"``: format_max / amax, rounded down to a power of two.

    Multiplying by a power of two is exact. ``eps`` replaces smaller amaxes; ``fmt`` is the format of the codes.
    """
    rounded_down = (_quotient(amax, fmt, eps).view(torch.int32) & FLOAT32_EXPONENT_MASK).view(torch.float32)
    return nan_where_not_finite(amax, _one_where_empty(amax, rounded_down, eps))


def _from_scale_byte(amax: Tensor, byte: Tensor) -> Tensor:
    """Compute the multiplier 2**(127 - byte), 1 / an E8M0 scale; NaN where ``amax`` is not finite."""
    return nan_where_not_finite(amax, E8M0.decode(254 - byte))


def e8m0_rceil(amax: Tensor, fmt: Float8Format | Float4Format, eps: float) -> Tensor:
    """Compute multipliers (1 / scale) by ``"e8m0_rceil"``, with scales rounded up to powers of two.

    A scale is amax / format_max of ``fmt``, rounded up, so no value saturates. The scale of a block of zeros is the
    byte 0. ``eps`` replaces smaller amaxes.
    """
    scale = _floored(amax, eps).float() * exact_quotient(1.0, torch.full((), fmt.max, device=amax.device))
    bits = scale.view(torch.int32)
    exponent, mantissa = bits >> FLOAT32_MANTISSA_BITS, bits & MANTISSA_MASK
    # subnormal scales up to 2**-127 have byte 0, larger ones byte 1
    half = 1 << (FLOAT32_MANTISSA_BITS - 1)
    round_up = torch.where(exponent == 0, mantissa > half, mantissa > 0)
    return _from_scale_byte(amax, exponent + round_up.to(torch.int32))


def e8m0_floor(amax: Tensor, fmt: Float8Format | Float4Format, eps: float) -> Tensor:
    """Compute multipliers (1 / scale) by ``"e8m0_floor"``, the rule of the MX specification.

    The scale is 2**(floor(log2(amax)) - floor(log2(format_max))) for the format ``fmt``; values may saturate. ``eps``
    replaces smaller amaxes.
    """
    exponent = _floored(amax, eps).float().view(torch.int32) >> FLOAT32_MANTISSA_BITS
    return _from_scale_byte(amax, (exponent - fmt.max_exponent).clamp(min=0))


SCALE_RULES: dict[str, Rule] = {
    "fp32": fp32,
    "pow2": pow2,
    "e8m0_rceil": e8m0_rceil,
    "e8m0_floor": e8m0_floor,
}
