"""``tl.dot_scaled``: the product of two tiles of codes with block scales, as each GPU computes it.

Triton 3.7.1 and 3.9 compile it for these tensor cores, as their PTX shows (12.1* is only from Triton 3.8 on):

    capability          operands                                     multiplied by
    10.x, 11.0          both with scales, in 4 or 8 bits             tcgen05: codes and scales as they are
    12.0, 12.1*         both with scales, both in 4 or both in 8     mma with block scales: as they are
    others, from 8.9    any                                          bf16 mma, or fp16 if an operand is fp16, of scaled
                                                                     values that are rounded to that format

The last row is Triton's decomposition (lib/Dialect/TritonGPU/Transforms/DecomposeScaledBlocked.cpp): an E8M0 scale of
2^-127 becomes 0, and a scale beyond fp16's range infinite. Tensor cores for block scales only support some tile sizes;
for others Triton decomposes, with a different result if a scaled value is no bf16 number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import TensorHandle as Handle

from fp8compile.testing.gpu.program.arithmetic import convert

__all__ = ["scaled_dot", "values_of", "with_constant_formats"]

E2M1 = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
ALL_OF_12 = (3, 8)  # from this version on 12.1 has the tensor core of 12.0, and e4m3 scales are decomposed
NAN = 0xFF  # an E8M0 scale


def values_of(handle: Handle) -> np.ndarray:
    """The numbers of an interpreter's tile, a handle, in float64."""
    kind = handle.dtype.scalar
    if kind.is_floating() and (kind == tl.bfloat16 or kind.primitive_bitwidth == 8):  # kept as their bits
        return convert(handle.data, kind.name, "fp32").view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


def with_constant_formats(original: Callable[..., tl.tensor]) -> Callable[..., tl.tensor]:
    """Wrap Triton's check of ``tl.dot_scaled`` to take formats as strings, as Triton 3.8 and later do."""
    if VERSION >= ALL_OF_12:
        return original

    def call(semantic: Any, *args: Any) -> tl.tensor:
        return original(semantic, *(tl.constexpr(each) if isinstance(each, str) else each for each in args))

    return call


def scaled_dot(capability: tuple[int, int] | None) -> Callable[..., Handle]:
    """Make the interpreter's ``create_dot_scaled`` for a compute capability; for None, calls of it raise."""

    def call(
        _: Any, a: Handle, a_scale: Handle | None, a_format: Any, b: Handle, b_scale: Handle | None, b_format: Any,
        fast_math: bool, a_k_pack: bool, b_k_pack: bool, total: Handle,
    ) -> Handle:  # fmt: skip
        formats, scales = (a_format.name, b_format.name), (a_scale, b_scale)
        native = _is_native(capability, formats, scales)
        compute = None if native else "fp16" if "FP16" in formats else "bf16"
        left = _scaled(_unpacked(a, formats[0], -1 if a_k_pack else -2), a_scale, compute, fast_math=fast_math)
        right = _unpacked(b, formats[1], -2 if b_k_pack else -1).swapaxes(-1, -2)
        right = _scaled(right, b_scale, compute, fast_math=fast_math).swapaxes(-1, -2)
        result = left @ right + values_of(total)
        return Handle(result.astype(interpreter._get_np_dtype(total.dtype)), total.dtype.scalar)

    return call


def _is_native(capability: tuple[int, int] | None, formats: tuple[str, str], scales: tuple[Any, Any]) -> bool:
    """Whether tensor cores multiply codes of these formats, such as "E2M1", with their scales directly.

    If not, Triton scales the values first.

    Raises:
        NotImplementedError: ``capability`` is None.
        AssertionError: Triton does not compile the product for the GPU.
    """
    if capability is None:
        raise NotImplementedError(
            "tl.dot_scaled requires the compute capability of a GPU, but none was passed. Create the simulation with "
            "fp8compile.testing.gpu.program.arithmetic.Arithmetic(capability=(10, 0)), or call run_gpu_program."
        )
    on = f"on compute capability {'.'.join(map(str, capability))}"
    assert capability >= (8, 9), f"tl.dot_scaled {on}, but is supported from 8.9 on"
    four = [each == "E2M1" for each in formats]
    is_small = all(each in ("E2M1", "E4M3", "E5M2") for each in formats) and None not in scales
    by_block = capability[0] in (10, 11) or capability == (12, 0) or (capability[0] == 12 and VERSION >= ALL_OF_12)
    native = is_small and by_block and (capability[0] in (10, 11) or four[0] == four[1])
    if any(each is not None and each.dtype.scalar == tl.float8e4nv for each in scales):
        is_known = all(four) and None not in scales
        assert is_known, f"scales in e4m3 with operands in {' and '.join(formats)}"
        assert native or VERSION >= ALL_OF_12, f"scales in e4m3 {on}: Triton {triton.__version__} has no product"
    return native


def _unpacked(operand: Handle, name: str, packed: int) -> np.ndarray:
    if name != "E2M1":
        return values_of(operand)
    codes = np.moveaxis(operand.data, packed, -1)
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return np.moveaxis(E2M1[pairs], -1, packed)


def _scaled(values: np.ndarray, scale: Handle | None, compute: str | None, *, fast_math: bool) -> np.ndarray:
    """Multiply values (..., rows, k) by scales (..., rows, blocks of k), in float64.

    If ``compute`` is "bf16" or "fp16", results are rounded to that format; ``fast_math`` makes NaN scales infinite.
    """
    if compute is not None:
        values = _rounded(values, compute)
    if scale is None:
        return values
    is_float = scale.dtype.scalar.is_floating()
    is_nan = np.zeros(scale.data.shape, bool) if is_float else scale.data == NAN
    numbers = values_of(scale) if is_float else np.exp2(scale.data.astype(np.float64) - 127)
    if compute is not None and not is_float:
        numbers = np.where(scale.data == 0, 0, np.where(is_nan, np.inf, numbers))
        numbers = _rounded(numbers, compute)
    if compute is None or not fast_math:
        numbers = np.where(is_nan, np.nan, numbers)
    product = values * numbers.repeat(values.shape[-1] // numbers.shape[-1], -1)
    return product if compute is None else _rounded(product, compute)


def _rounded(values: np.ndarray, name: str) -> np.ndarray:
    bits = convert(values.astype(np.float32), "fp32", name)
    return convert(bits, name, "fp32").view(np.float32).astype(np.float64)
