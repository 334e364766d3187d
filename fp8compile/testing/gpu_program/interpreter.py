"""Triton's interpreter with a GPU's semantics: kernels run on CPU tensors, program by program, in an order of choice.

Triton decides when it is imported whether it interprets. Here it need not: functions under ``triton.jit`` that a
kernel calls are interpreted while `Interpreter.active` lasts, so one process can interpret and compile.

What is mended (docs/upstream.md has the list, tests/test_gpu_interpreter.py a comparison with PyTorch for each):

    conversions         float8 loses carries and NaN, bfloat16 is truncated and loses subnormals, int and float64 to
                        bfloat16 and back give bits of another type
    reductions          by an unknown function they go element by element: seconds; here by halves
    sums                in float64, rounded once, as in the reference: no order of additions is the GPU's
    maximum, minimum    max.f32 drops a NaN
    fused multiply-add  is rounded twice
    arithmetic shift    changes its operands
    libdevice           returns None; here by PyTorch's functions, and what isn't known raises
    bfloat16 arithmetic is that of the bits as integers; here it raises
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.language.extra import libdevice

from fp8compile.testing.gpu_program import arithmetic as gpu
from fp8compile.testing.gpu_program.memory import Access

__all__ = ["ORDERS", "Interpreter"]

ORDERS = ("forwards", "backwards", "shuffled")
Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
NOT_INTERPRETED = ("x_grid_barrier", "exclusive_scan_decoupled_lookback")  # programs that wait for one another
LIBDEVICE = (
    "exp exp2 expm1 log log2 log10 log1p rsqrt sqrt erf erfc erfinv tanh sinh cosh sin cos tan asin acos atan asinh "
    "acosh atanh floor ceil trunc isnan isinf signbit lgamma copysign pow fmod atan2 hypot abs"
).split()  # PyTorch's names too
OTHER_NAMES = {"fabs": torch.abs, "nearbyint": torch.round, "rint": torch.round, "div_rn": torch.div}


def _ordered(order: str, count: int) -> Sequence[int]:
    programs = list(range(count))
    if order == "shuffled":
        random.Random(0).shuffle(programs)
    return programs[::-1] if order == "backwards" else programs


class Interpreter:
    """Runs kernels.

    Attributes:
        arithmetic: What the GPU's compiler may choose.
        multiply_adds: How many elements were computed by a fused multiply-add.
    """

    def __init__(self, arithmetic: gpu.Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.multiply_adds = 0
        self._order = ORDERS[0]
        self._access: Access | None = None
        self._rewritten: dict[Callable, Callable] = {}

    def launch(self, name: str, fn: Callable, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Run a kernel over its grid.

        Args:
            name: For messages.
            fn: The Python function under ``triton.jit``.
            grid: Numbers of programs, up to three.
            arguments: By name; tensors on the CPU, and constants.

        Raises:
            IndexError: A program accesses memory outside of the tensors.
            RuntimeError: Two programs access one address, and one of them writes.
            NotImplementedError: The kernel does something that isn't known here.
        """
        function = self._rewrite(fn)
        self._access = Access.of(name, arguments)
        kinds = {each: str(kind) for each, kind in fn.__annotations__.items()}
        values = {
            each: value if "constexpr" in kinds.get(each, "") else _argument(value)
            for each, value in arguments.items()
        }
        shape = (*grid, *(1,) * (3 - len(grid)))
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*shape)
        with _disable_current_modes():  # PyTorch computes here as a part of the kernel
            for number in _ordered(self._order, int(np.prod(shape))):
                self._access.program = number
                builder.set_grid_idx(*(int(each) for each in np.unravel_index(number, shape)))
                function(**values)
        self._access.assert_no_race()
        self._access = None

    def _rewrite(self, fn: Callable) -> Callable:
        if fn not in self._rewritten:
            if waits := [name for name in NOT_INTERPRETED if name in fn.__code__.co_names]:
                raise NotImplementedError(
                    f"run_gpu_program: {fn.__name__} calls {waits[0]}: its programs wait for one another, and here they "
                    "run one after the other."
                )
            self._rewritten[fn] = interpreter.FunctionRewriter(fn).rewrite_ast()
        return self._rewritten[fn]

    @contextmanager
    def active(self, order: str = ORDERS[0]) -> Iterator[None]:
        """While this runs, functions under ``triton.jit`` can be launched and called on the CPU.

        Args:
            order: Of a launch's programs, one of ``ORDERS``.
        """
        self._order = order
        with ExitStack() as stack:
            for owner, name, value in (*self._jit(), *self._memory(), *self._floats(), *_reductions()):
                stack.enter_context(mock.patch.object(owner, name, value))
            for name, function in _libdevice(gpu.unary_functions(self.arithmetic)).items():
                stack.enter_context(mock.patch.object(libdevice, name, function))
            stack.enter_context(np.errstate(all="ignore"))
            # the whole language at once; the interpreter would do it for each nested call
            scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            stack.callback(scope.restore)
            yield

    def _jit(self) -> Iterator[tuple]:
        """Launches of kernels that are written by hand, and calls of one function by another."""
        jitted = triton.runtime.jit.JITFunction

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            options = {name for name in kwargs if name not in kernel.arg_names}
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | {
                name: value for name, value in kwargs.items() if name not in options
            }
            self.launch(kernel.__name__, kernel.fn, grid(arguments) if callable(grid) else grid, arguments)

        yield jitted, "run", run
        yield jitted, "__call__", lambda function, *args, **kwargs: self._rewrite(function.fn)(*args, **kwargs)

    def _memory(self) -> Iterator[tuple]:
        def watched(kind: str, original: Callable, mask_at: int) -> Callable:
            def call(builder: Builder, *args: Any) -> Any:
                pointers = args[1] if kind == "atomic" else args[0]
                width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                self._access.record(kind, pointers.data, args[mask_at].data, width)
                return original(builder, *args)

            return call

        yield Builder, "create_masked_load", watched("load", Builder.create_masked_load, 1)
        yield Builder, "create_masked_store", watched("store", Builder.create_masked_store, 2)
        yield Builder, "create_atomic_rmw", watched("atomic", Builder.create_atomic_rmw, 3)
        yield Builder, "create_atomic_cas", _unknown("atomic_cas")

    def _floats(self) -> Iterator[tuple]:
        yield interpreter, "_convert_float", lambda bits, source, target, _: gpu.convert(bits, source.name, target.name)
        yield Builder, "cast_impl", _cast
        yield Builder, "create_ashr", _arithmetic_shift
        yield Builder, "binary_op", _without_bfloat16(Builder.binary_op)
        yield Builder, "unary_op", _without_bfloat16(Builder.unary_op)
        for name, function in gpu.unary_functions(self.arithmetic).items():
            yield Builder, f"create_{name}", lambda self, arg, f=function: self.unary_op(arg, f)
        yield Builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax)
        yield Builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin)
        yield Builder, "create_clampf", _clamp
        yield Builder, "create_fma", lambda _, x, y, z: Handle(_fma(x.data, y.data, z.data), z.dtype.scalar)
        if self.arithmetic.approximate:
            yield Builder, "create_fdiv", lambda self, a, b: self.binary_op(a, b, gpu.full_division)
        if self.arithmetic.contract:
            yield from self._contraction()

    def _contraction(self) -> Iterator[tuple]:
        def multiply(builder: Builder, a: Handle, b: Handle) -> Handle:
            result = builder.binary_op(a, b, np.multiply)
            result.attr["product"] = a.data, b.data
            return result

        def add(builder: Builder, a: Handle, b: Handle, sign: int) -> Handle:
            for x, y, of_product, of_other in ((a, b, 1, sign), (b, a, sign, 1)):
                if "product" in x.attr and x.data.dtype == np.float32:
                    left, right = x.attr["product"]
                    self.multiply_adds += y.data.size
                    return Handle(gpu.fma(of_product * left, right, of_other * y.data), a.dtype.scalar)
            return builder.binary_op(a, b, np.add if sign > 0 else np.subtract)

        yield Builder, "create_fmul", multiply
        yield Builder, "create_fadd", lambda self, a, b: add(self, a, b, 1)
        yield Builder, "create_fsub", lambda self, a, b: add(self, a, b, -1)


# ---------------------------------------------------------------------------------- arguments and conversions


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float8_e8m0fnu:
        value = value.view(torch.uint8)  # as Inductor's signature has it
    return interpreter._implicit_cvt(value)


def _cast(_: Builder, source: Handle, target: tl.dtype) -> Handle:
    """A conversion between numbers; bfloat16 by way of float32, in which all of its values are."""
    values, kinds = source.data, (source.dtype.scalar, target.scalar)
    if tl.bfloat16 not in kinds:
        return Handle(values.astype(interpreter._get_np_dtype(target)), target.scalar)
    if kinds[0] == tl.bfloat16:
        values = gpu.convert(values, "bf16", "fp32").view(np.float32)
    if kinds[1] != tl.bfloat16:
        return Handle(values.astype(interpreter._get_np_dtype(target)), target.scalar)
    if values.dtype == np.float64:
        return Handle(gpu.convert(values, "fp64", "bf16"), target.scalar)
    return Handle(gpu.convert(values.astype(np.float32), "fp32", "bf16"), target.scalar)


def _arithmetic_shift(builder: Builder, left: Handle, right: Handle) -> Handle:
    signed = [Handle(each.data.astype(interpreter._get_signed_np_dtype(each.data.dtype)), each.dtype)
              for each in (left, right)]  # fmt: skip
    return builder.binary_op(*signed, np.right_shift)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    if z.dtype != np.float32:
        raise NotImplementedError(f"run_gpu_program: a fused multiply-add of {z.dtype} is not known.")
    return gpu.fma(x, y, z)


def _clamp(builder: Builder, values: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
    if propagate_nan == interpreter._ir.PROPAGATE_NAN.ALL:
        return builder.ternary_op(values, low, high, np.clip)
    return Handle(np.fmin(np.fmax(values.data, low.data), high.data), values.dtype.scalar)


def _without_bfloat16(original: Callable) -> Callable:
    def call(builder: Builder, *args: Any) -> Handle:
        for arg in args[:-1]:
            if arg.dtype.scalar == tl.bfloat16:
                raise NotImplementedError("run_gpu_program: arithmetic in bfloat16 is not known; Inductor's is float32.")
        return original(builder, *args)

    return call


def _unknown(name: str) -> Callable:
    def call(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"run_gpu_program: a kernel calls {name}, which is not known here.")

    return call


# ---------------------------------------------------------------------------------- functions and reductions


def _on_tensors(function: Callable[..., np.ndarray]) -> Callable:
    """A function of arrays as one of Triton's tensors."""

    def call(*args: Any) -> tl.tensor:
        tensors = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
        result = function(*(each.handle.data for each in tensors))
        kind = tl.int1 if result.dtype == bool else tensors[0].dtype.scalar
        shape = list(tensors[0].shape)
        return tl.tensor(Handle(result, kind), tl.block_type(kind, shape) if shape else kind)

    return call


def _libdevice(chosen: Mapping[str, Callable]) -> dict[str, Callable]:
    """All of libdevice: by PyTorch what is known, and what isn't raises."""
    known = {name: gpu.on_arrays(getattr(torch, name)) for name in LIBDEVICE}
    known |= {name: gpu.on_arrays(function) for name, function in OTHER_NAMES.items()} | dict(chosen)
    names = [name for name, value in vars(libdevice).items() if isinstance(value, FunctionType)]
    return {name: _on_tensors(known[name]) if name in known else _unknown(f"libdevice.{name}") for name in names}


def _reductions() -> Iterator[tuple]:
    yield interpreter.ReduceOps, "generic_reduce", _by_halves
    yield interpreter.ReduceOps, "sum", _sum
    yield interpreter.ReduceOps, "min_max", _extreme


def _by_halves(reduction: Any, inputs: tuple) -> list:
    """A reduction by any function: of the two halves, then of the quarters, as warps do."""
    if reduction.axis is None:
        inputs = [reduction.to_tensor(each.handle.data.reshape(-1), each.dtype) for each in inputs]
    axis = (reduction.axis or 0) % len(inputs[0].handle.data.shape)
    parts = [np.moveaxis(each.handle.data, axis, 0) for each in inputs]
    kinds = [each.dtype for each in inputs]
    while len(parts[0]) > 1:
        half = len(parts[0]) // 2
        sides = [
            reduction.to_tensor(np.ascontiguousarray(part[at]), kind)
            for at in (slice(0, half), slice(half, None))
            for part, kind in zip(parts, kinds, strict=True)
        ]
        result = reduction.combine_fn(*sides)
        parts = [each.handle.data for each in (result if isinstance(result, tuple) else (result,))]
    keep = reduction.keep_dims
    results = [np.moveaxis(part, 0, axis) if keep else part[0] for part in parts]
    return [reduction.to_tensor(result, kind) for result, kind in zip(results, kinds, strict=True)]


def _sum(reduction: Any, values: tl.tensor) -> tl.tensor:
    if values.dtype.scalar == tl.bfloat16:
        raise NotImplementedError("run_gpu_program: a sum of bfloat16 is not known; Inductor's is of float32.")
    data = values.handle.data
    wide = np.float64 if data.dtype == np.float32 else data.dtype
    total = np.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims, dtype=wide)
    return reduction.to_tensor(total, values.dtype)


def _extreme(reduction: Any, inputs: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """tl.max and tl.min: a NaN is dropped. With an index Inductor has functions of its own."""
    if idx_reduce_op is not None:
        raise NotImplementedError("run_gpu_program: tl.argmax and tl.argmin are not known; Inductor has its own.")
    values = inputs[0] if isinstance(inputs, tuple) else inputs
    function = np.fmax if val_reduce_op is np.nanmax else np.fmin
    data = values.handle.data
    axis = reduction.axis if reduction.axis is not None else tuple(range(data.ndim))
    return reduction.to_tensor(function.reduce(data, axis=axis, keepdims=reduction.keep_dims), values.dtype)
