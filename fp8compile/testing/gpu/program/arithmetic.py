"""Float arithmetic as a GPU does it, on arrays of Triton's interpreter.

The interpreter keeps bfloat16 as uint16 and float8 as uint8. Conversions and transcendental functions are PyTorch's,
so that the reference, which is PyTorch, has the same bits. What a GPU's compiler is free to choose (fused
multiply-adds, approximate division and roots) is off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Arithmetic", "convert", "fma", "on_arrays"]

# Triton's name of a type: PyTorch's, and the unsigned integers that hold its bits
STORED_AS: dict[str, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8),
    "fp8e5": (torch.float8_e5m2, np.uint8),
    "bf16": (torch.bfloat16, np.uint16),
    "fp16": (torch.float16, np.uint16),
    "fp32": (torch.float32, np.uint32),
    "fp64": (torch.float64, np.uint64),
}
# torch has few unsigned
SIGNED: dict[Any, Any] = {np.uint8: np.uint8, np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """Choices that a GPU's compiler is free to make, and a fault of it.

    Attributes:
        contract: Whether each float32 product that is added to something is one fused multiply-add.
        approximate: Whether float32 division is ``div.full``, and exponentials and roots are ``ex2.approx`` and
            ``rsqrt.approx``: results that these instructions may give, up to 2 units in the last place off.
        float8_by_float16: Whether float32 becomes float8 by way of float16, cut toward zero, as Triton casts for
            compute capability 8.9 (triton#11753): 0.4 % of e4m3 codes are others.
    """

    contract: bool = False
    approximate: bool = False
    float8_by_float16: bool = False


def through_float16(values: np.ndarray) -> np.ndarray:
    """Float32 values cut toward zero to float16, in float32 again."""
    nearest = values.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(beyond, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float32)


def convert(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """The bits of values converted between two float types, rounded to nearest even.

    Args:
        bits: The values, or integers that hold their bits.
        source: Triton's name of their type, such as "bf16".
        target: Triton's name of the result's.

    Raises:
        NotImplementedError: Another type.
    """
    if not {source, target} <= STORED_AS.keys():
        raise NotImplementedError(f"run_gpu_program: a conversion from {source} to {target} is not known.")
    (source_dtype, source_bits), (target_dtype, target_bits) = STORED_AS[source], STORED_AS[target]
    values = torch.from_numpy(np.array(bits).view(SIGNED[source_bits])).view(source_dtype)
    if source == "fp64" and target in ("fp8e4nv", "fp8e5"):
        raise NotImplementedError(f"run_gpu_program: a conversion from {source} to {target} is not known.")
    result = values.to(torch.float32).to(target_dtype) if source != "fp64" else values.to(target_dtype)
    return result.view(torch.uint8).numpy().view(target_bits).reshape(np.shape(bits))


def on_arrays(function: Function) -> Callable[..., np.ndarray]:
    """Wrap a function of PyTorch as a function of arrays; float16 is computed in float32 and rounded."""

    def call(*arrays: np.ndarray) -> np.ndarray:
        return function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()

    return call


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd there, and then to float32; the result is the same as
    with one rounding (Boldo and Melquiond 2008).
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
    """Round float64 values to float32 towards zero."""
    nearest = exact.astype(np.float32)
    beyond = np.isfinite(nearest) & (np.abs(nearest.astype(np.float64)) > np.abs(exact))
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def full_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide as ``div.full.f32`` may: by the reciprocal. Float64 is divided exactly, as on a GPU."""
    return a * truncated(1 / b.astype(np.float64)) if a.dtype == np.float32 else a / b


def approximate_exp2(x: np.ndarray) -> np.ndarray:
    """``ex2.approx``."""
    return truncated(np.exp2(x.astype(np.float64))) if x.dtype == np.float32 else np.exp2(x)


def approximate_exp(x: np.ndarray) -> np.ndarray:
    """As Triton writes ``exp``: a product by log2(e), rounded, then ``ex2.approx``."""
    return approximate_exp2(x * np.float32(1.4426950408889634)) if x.dtype == np.float32 else np.exp(x)


def approximate_rsqrt(x: np.ndarray) -> np.ndarray:
    """``rsqrt.approx``."""
    return truncated(1 / np.sqrt(x.astype(np.float64))) if x.dtype == np.float32 else 1 / np.sqrt(x)


def unary_functions(arithmetic: Arithmetic) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Implementations of Triton's functions of one number, by name."""
    names = ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos", "erf")
    functions = {name: on_arrays(getattr(torch, name)) for name in names}
    if arithmetic.approximate:
        functions |= {"exp": approximate_exp, "exp2": approximate_exp2, "rsqrt": approximate_rsqrt}
    return functions
