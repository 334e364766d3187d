"""Functions of Triton's language for its interpreter: CUDA's libdevice, reductions, and ``tl.dot``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.extra import libdevice

from fp8compile.testing.gpu.program import arithmetic as gpu
from fp8compile.testing.gpu.program.batches import along
from fp8compile.testing.gpu.program.scaled_tiles import values_of

__all__ = ["applied", "dot", "libdevice_functions", "reductions", "unknown"]

LIBDEVICE = (  # the names that PyTorch has too
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "sqrt", "erf", "erfc", "erfinv", "tanh", "sinh",
    "cosh", "sin", "cos", "tan", "asin", "acos", "atan", "asinh", "acosh", "atanh", "floor", "ceil", "trunc", "isnan",
    "isinf", "signbit", "lgamma", "copysign", "pow", "fmod", "atan2", "hypot", "abs",
)  # fmt: skip
OTHER_NAMES: dict[str, Callable[..., Any]] = {
    "fabs": torch.abs,
    "nearbyint": torch.round,
    "rint": torch.round,
    "div_rn": torch.div,
}


def unknown(name: str) -> Callable[..., Any]:
    """Make a replacement for the function ``name``, which isn't known here: a call of it raises."""

    def call(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"run_gpu_program: a kernel calls {name}, which the simulation does not support. Test this kernel on a "
            "GPU."
        )

    return call


def applied(function: Callable[..., np.ndarray], *handles: Any) -> Any:
    """Apply a function of NumPy arrays to the interpreter's handles; returns a handle.

    The handle's type is the first operand's type, or bool for a predicate.
    """
    result = function(*(each.data for each in handles))
    return interpreter.TensorHandle(result, tl.int1 if result.dtype == bool else handles[0].dtype.scalar)


def _on_tensors(function: Callable[..., np.ndarray]) -> Callable[..., Any]:
    def call(*args: Any) -> tl.tensor:
        tensors = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
        handle = applied(function, *(each.handle for each in tensors))
        kind, shape = handle.dtype, list(tensors[0].shape)
        return tl.tensor(handle, tl.block_type(kind, shape) if shape else kind)

    return call


def libdevice_functions(chosen: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Functions of CUDA's libdevice by name, from ``chosen`` or else from PyTorch; unknown ones raise."""
    known = {name: gpu.on_arrays(getattr(torch, name)) for name in LIBDEVICE}
    known |= {name: gpu.on_arrays(function) for name, function in OTHER_NAMES.items()} | dict(chosen)
    names = [name for name, value in vars(libdevice).items() if isinstance(value, FunctionType)]
    return {name: _on_tensors(known[name]) if name in known else unknown(f"libdevice.{name}") for name in names}


def dot(_: Any, a: Any, b: Any, total: Any, input_precision: Any, imprecise: int) -> Any:
    """Compute ``tl.dot`` of tiles: ``a @ b + total`` in float64, rounded once to the dtype of ``total``.

    ``input_precision`` and ``imprecise`` are ignored: float32 is not truncated to TF32.
    """
    kind = total.dtype.scalar
    result = values_of(a) @ values_of(b) + values_of(total)
    if kind == tl.bfloat16:
        return interpreter.TensorHandle(gpu.convert(result, "fp64", "bf16"), kind)
    return interpreter.TensorHandle(result.astype(interpreter._get_np_dtype(kind)), kind)


def reductions() -> Iterator[tuple[Any, ...]]:
    """Yield patches of reductions in Triton's interpreter, each as (object, attribute, replacement).

    Custom functions combine halves, as warps do. Sums are rounded once. Maxima and minima drop NaN.
    """
    yield interpreter.ReduceOps, "generic_reduce", _by_halves
    yield interpreter.ReduceOps, "sum", _sum
    yield interpreter.ReduceOps, "min_max", _extreme


def _by_halves(reduction: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Compute ``tl.reduce`` of the tensors ``inputs`` by halves: combine two halves to one, repeatedly.

    Warps reduce in this order. ``reduction`` is the interpreter's object with axis and combine function.
    """
    given, axes = zip(*(along(reduction.axis, each.handle.data) for each in inputs), strict=True)
    axis, keep = axes[0], reduction.keep_dims
    parts = [np.moveaxis(each, axis, 1) for each in given]  # programs, the halves, the rest
    kinds = [each.dtype for each in inputs]
    while parts[0].shape[1] > 1:
        half = parts[0].shape[1] // 2
        sides = [
            reduction.to_tensor(np.ascontiguousarray(part[:, at]), kind)
            for at in (slice(0, half), slice(half, None))
            for part, kind in zip(parts, kinds, strict=True)
        ]
        result = reduction.combine_fn(*sides)
        parts = [each.handle.data for each in (result if isinstance(result, tuple) else (result,))]
    results = [np.moveaxis(part, 1, axis) if keep else part[:, 0] for part in parts]
    if keep and reduction.axis is None:
        results = [each.reshape(len(each), *(1,) * len(inputs[0].shape)) for each in results]
    return [reduction.to_tensor(result, kind) for result, kind in zip(results, kinds, strict=True)]


def _axes(reduction: Any, data: np.ndarray) -> int | tuple[int, ...]:
    return tuple(range(1, data.ndim)) if reduction.axis is None else along(reduction.axis, data)[1]


def _sum(reduction: Any, values: tl.tensor) -> tl.tensor:
    if values.dtype.scalar == tl.bfloat16:
        raise NotImplementedError(
            "run_gpu_program: a sum of bfloat16 is not supported, because Inductor only generates sums of float32. "
            "Cast to float32 before the sum."
        )
    data = values.handle.data
    wide = np.float64 if data.dtype.kind == "f" else data.dtype
    total = np.sum(data, axis=_axes(reduction, data), keepdims=reduction.keep_dims, dtype=wide)
    return reduction.to_tensor(total, values.dtype)


def _extreme(reduction: Any, inputs: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """Compute ``tl.max`` or ``tl.min`` of ``inputs``; ``val_reduce_op`` says which. NaN are dropped.

    Argmax and argmin (an ``idx_reduce_op``) raise, because Inductor has functions of its own for them.
    """
    if idx_reduce_op is not None:
        raise NotImplementedError(
            "run_gpu_program: tl.argmax and tl.argmin are not supported, because Inductor generates its own functions "
            "instead."
        )
    values = inputs[0] if isinstance(inputs, tuple) else inputs
    function = np.fmax if val_reduce_op is np.nanmax else np.fmin
    data = values.handle.data
    return reduction.to_tensor(
        function.reduce(data, axis=_axes(reduction, data), keepdims=reduction.keep_dims), values.dtype
    )
