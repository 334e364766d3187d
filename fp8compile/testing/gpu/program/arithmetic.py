"""Float arithmetic with a GPU's results, on arrays of Triton's interpreter.

The interpreter stores bfloat16 as uint16 and float8 as uint8. Conversions and transcendental functions are PyTorch's,
so that the reference, which runs in PyTorch, has the same bits. A GPU's compiler may use fused multiply-adds and
approximate division and roots; here they are off unless `Arithmetic` turns them on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["STORED_AS", "Arithmetic", "convert", "elementwise", "fma", "on_arrays", "square_root"]

# by Triton's name of a type: PyTorch's dtype, and the unsigned integers that hold its bits
STORED_AS: dict[str, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8),
    "fp8e5": (torch.float8_e5m2, np.uint8),
    "bf16": (torch.bfloat16, np.uint16),
    "fp16": (torch.float16, np.uint16),
    "fp32": (torch.float32, np.uint32),
    "fp64": (torch.float64, np.uint64),
}
# PyTorch computes with few unsigned integers, so bits are viewed as signed ones
SIGNED: dict[Any, Any] = {np.uint8: np.uint8, np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}
Function = Callable[..., torch.Tensor]
VECTOR = 16  # elements of the widest vectors that PyTorch's CPU kernels use, or a multiple of their number


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic that a GPU's compiler may choose, and one bug of Triton's.

    Attributes:
        contract: Whether a float32 multiplication followed by an addition is one fused multiply-add.
        approximate: Whether float32 division is ``div.full``, and exponentials and inverse roots are ``ex2.approx``
            and ``rsqrt.approx``. Results are off by up to 2 units in the last place. A GPU may give other results
            within this bound.
        float8_by_float16: Whether float32 is first truncated toward zero to float16 and then rounded to float8, as
            Triton casts for compute capability 8.9 (triton#11753). The truncation changes 0.4 % of e4m3 codes.
        capability: The GPU's compute capability, which decides how ``tl.dot_scaled`` multiplies; with None, it raises.
    """

    contract: bool = False
    approximate: bool = False
    float8_by_float16: bool = False
    capability: tuple[int, int] | None = None


def through_float16(values: np.ndarray) -> np.ndarray:
    """Truncate float32 values toward zero to float16, and return them as float32."""
    nearest = values.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(beyond, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float32)


def convert(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert values between two float types, rounded to nearest even.

    Conversions to float8 saturate, infinities too, and convert NaN to 0x7F, as ``cvt.rn.satfinite`` does.

    Args:
        bits: The values, or integers that hold their bits.
        source: Triton's name of the values' type, such as "bf16".
        target: Triton's name of the result's type.

    Returns:
        The bits of the results as unsigned integers.

    Raises:
        NotImplementedError: A type isn't known here, or float64 is to be converted to float8.
    """
    if not {source, target} <= STORED_AS.keys():
        raise NotImplementedError(
            f"run_gpu_program: a conversion from {source} to {target} is not supported; both must be one of "
            f"{', '.join(STORED_AS)}."
        )
    (source_dtype, source_bits), (target_dtype, target_bits) = STORED_AS[source], STORED_AS[target]
    values = torch.from_numpy(np.array(bits, order="C").view(SIGNED[source_bits])).view(source_dtype)
    if source == "fp64" and target in ("fp8e4nv", "fp8e5"):
        raise NotImplementedError(
            f"run_gpu_program: a conversion from fp64 to {target} is not supported. Convert to fp32 first."
        )
    if target in ("fp8e4nv", "fp8e5"):
        largest = torch.finfo(target_dtype).max
        values = values.to(torch.float32).clamp(-largest, largest)
        values = torch.where(values.isnan(), torch.nan, values)
    result = values.to(torch.float32).to(target_dtype) if source != "fp64" else values.to(target_dtype)
    return result.view(torch.uint8).numpy().view(target_bits).reshape(np.shape(bits))


def on_arrays(function: Function) -> Callable[..., np.ndarray]:
    """Wrap a PyTorch function as a function of NumPy arrays; PyTorch computes float16 in float32, and rounds."""

    def call(*arrays: np.ndarray) -> np.ndarray:
        return function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()

    return call


def elementwise(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Apply a PyTorch function so that an element's result depends on neither position nor strides."""
    whole = torch.nn.functional.pad(x.contiguous().flatten(), (0, -x.numel() % VECTOR))
    return function(whole)[: x.numel()].view(x.shape)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root; `torch.sqrt` is not correctly rounded if MKL computes it."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Compute ``a * b + c`` of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd in float64, and then to float32. The result is the same
    as with a single rounding (Boldo and Melquiond 2008).
    """
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = np.asarray(product + addend)
    virtual = total - product  # Knuth's two-sum: the error of the addition
    error = (product - (total - virtual)) + (addend - virtual)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    return np.where(inexact & is_even, odd, total).astype(np.float32)


def truncated(exact: np.ndarray) -> np.ndarray:
    """Round ``exact``, an array in float64, to float32 towards zero."""
    nearest = exact.astype(np.float32)
    beyond = np.isfinite(nearest) & (np.abs(nearest.astype(np.float64)) > np.abs(exact))
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def full_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide float32 arrays by way of a truncated reciprocal, as ``div.full.f32`` may; divide float64 plainly."""
    return a * truncated(1 / b.astype(np.float64)) if a.dtype == np.float32 else a / b


def approximate_exp2(x: np.ndarray) -> np.ndarray:
    """A possible result of ``ex2.approx`` for float32: the exact power of 2, truncated."""
    return truncated(np.exp2(x.astype(np.float64))) if x.dtype == np.float32 else np.exp2(x)


def approximate_exp(x: np.ndarray) -> np.ndarray:
    """``exp`` as Triton computes it: ``ex2.approx`` of ``x`` times log2(e), rounded."""
    return approximate_exp2(x * np.float32(1.4426950408889634)) if x.dtype == np.float32 else np.exp(x)


def approximate_rsqrt(x: np.ndarray) -> np.ndarray:
    """A possible result of ``rsqrt.approx`` for float32: the exact inverse root, truncated."""
    return truncated(1 / np.sqrt(x.astype(np.float64))) if x.dtype == np.float32 else 1 / np.sqrt(x)


def unary_functions(arithmetic: Arithmetic) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Implementations of Triton's unary functions by name, approximate if ``arithmetic`` says so."""
    names = ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos", "erf")
    functions = {name: on_arrays(partial(elementwise, getattr(torch, name))) for name in names}
    functions["sqrt"] = on_arrays(square_root)
    if arithmetic.approximate:
        functions |= {"exp": approximate_exp, "exp2": approximate_exp2, "rsqrt": approximate_rsqrt}
    return functions
