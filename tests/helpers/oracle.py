"""What codes and scales have to be, in numpy, sharing no code and no method with fp8compile.

Codes: a search among the exact midpoints of representable values. Quotients: numpy's float32 division, which the
hardware rounds correctly. Powers of two: frexp and ldexp. No bits are masked, and float64 holds exact values only.
"""

from __future__ import annotations

import numpy as np

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
LARGEST_FLOAT32 = np.finfo(np.float32).max


def value(code: int, fmt: str) -> float:
    """The value of one 8-bit code, from the definition of the format."""
    mantissa_bits = MANTISSA_BITS[fmt]
    bias = {"e4m3": 7, "e5m2": 15}[fmt]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if fmt == "e4m3" and code & 0x7F == 0x7F:
        return np.nan
    if fmt == "e5m2" and exponent == 31:
        return np.nan if mantissa else sign * np.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """Nearest codes of float32 values, a tie to the even code, saturating; NaN is 0x7f."""
    magnitudes = np.array([value(code, fmt) for code in range(LARGEST_CODE[fmt] + 1)])
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2  # exact: a bit more than the format has
    magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    tie = np.isin(magnitude, middles)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = code | (np.signbit(values).astype(np.int64) << 7)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def _with_special(amax: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(amax), multiplier, np.float32(np.nan))


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1.0), exponent).astype(np.float32)


def _quotient(amax: np.ndarray, fmt: str) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        quotient = np.float32(LARGEST[fmt]) / amax
    return np.where(np.isinf(quotient), LARGEST_FLOAT32, quotient)


def multiplier(amax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """What values are multiplied by, from a float32 amax that is not negative; NaN where amax is not finite."""
    if rule in ("fp32", "pow2"):
        quotient = _quotient(amax, fmt)
        if rule == "pow2":
            quotient = _power_of_two(np.frexp(quotient)[1] - 1)
        return _with_special(amax, np.where(amax == 0, np.float32(1.0), quotient))
    return _with_special(amax, _power_of_two(127 - scale_byte(amax, fmt, rule)))


def scale_byte(amax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """The E8M0 byte of a block; 255 where amax is not finite."""
    finite = np.where(np.isfinite(amax), amax, np.float32(1.0))
    if rule == "e8m0_rceil":
        ratio = finite * (np.float32(1.0) / np.float32(LARGEST[fmt]))
        fraction, exponent = np.frexp(ratio)  # ratio = fraction * 2**exponent, fraction in [1/2, 1)
        ceiling = np.where(fraction == 0.5, exponent - 1, exponent)
        byte = np.where(ratio == 0, 0, np.maximum(ceiling + 127, 0))
    else:
        byte = np.maximum(np.frexp(finite)[1] - 1 + 127 - LARGEST_EXPONENT[fmt], 0)
        byte = np.where(finite == 0, 0, byte)
    return np.where(np.isfinite(amax), byte, 255).astype(np.int64)


def inverse(multiplier: np.ndarray) -> np.ndarray:
    """The float32 scale that undoes a multiplier."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.float32(1.0) / multiplier
