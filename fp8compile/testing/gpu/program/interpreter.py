"""Triton's interpreter with a GPU's semantics: runs kernels on CPU tensors, many Triton programs at once.

Triton decides at import whether it interprets. Here, ``triton.jit`` functions are interpreted while
`Interpreter.active` lasts, so one process can interpret and compile.

Bugs of Triton's interpreter, and what is done here (docs/upstream.md lists the bugs;
tests/testing/gpu/test_gpu_interpreter.py compares each replacement with PyTorch):

    conversions         float8 loses carries and NaN, bfloat16 is truncated and loses subnormals, and int or float64 to
                        bfloat16 and back gives bits of another type; replaced by PyTorch's conversions
    reductions          a custom function is applied element by element, which takes seconds; here it combines
                        two halves repeatedly
    masks               a mask that involves a scalar holds integers, which numpy takes for indices; here it is bool
    sums                the order of additions is not the GPU's; here sums are in float64 and rounded once
    maximum, minimum    a NaN is kept; here it is dropped, as a GPU's max.f32 does
    fused multiply-add  is rounded twice; here once
    arithmetic shift    changes its operands; here it does not
    int(number)         raises in Triton 3.6 with numpy 2.4 or later; here it works
    libdevice           its functions return None; here PyTorch's functions are used, and unknown ones raise
    bfloat16 arithmetic computes with the bits as integers; here it raises
    tl.dot              multiplies the bits of bfloat16; here numbers, summed in float64 and rounded once per tile
    tl.dot_scaled       is not known; here it multiplies as the GPU does, see `scaled_tiles`
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.compiler.code_generator  # now: it copies functions of the language, which `active` replaces for a while
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle as Handle

from fp8compile.testing.gpu.program import arithmetic as gpu
from fp8compile.testing.gpu.program.assembly import inline_assembly
from fp8compile.testing.gpu.program.batches import ELEMENTS, Batch, Diverged, arrays, counting, stored, together
from fp8compile.testing.gpu.program.functions import dot, libdevice_functions, reductions, unknown
from fp8compile.testing.gpu.program.memory import Access
from fp8compile.testing.gpu.program.nan_origin import NanSearch
from fp8compile.testing.gpu.program.nan_watch import is_code, is_odd, nans
from fp8compile.testing.gpu.program.scaled_tiles import scaled_dot, with_constant_formats

__all__ = ["ORDERS", "Interpreter"]

ORDERS = ("forwards", "backwards", "shuffled")

UNKNOWN = (  # operators of newer versions among them
    "atomic_cas", "atomic_load", "atomic_poll", "atomic_store", "descriptor_gather", "descriptor_scatter",
)  # fmt: skip
MISSING = ("create_dot_scaled",)  # in Triton's interpreter
# code and defaults of functions as Triton's interpreter rewrites them, which is half of the time of a small launch
REWRITTEN: WeakKeyDictionary[Callable[..., Any], tuple[CodeType, Any]] = WeakKeyDictionary()
NOT_INTERPRETED = ("x_grid_barrier", "exclusive_scan_decoupled_lookback")  # programs that wait for one another


def _ordered(order: str, count: int) -> Sequence[int]:
    programs = list(range(count))
    if order == "shuffled":
        random.Random(0).shuffle(programs)
    return programs[::-1] if order == "backwards" else programs


class Interpreter:
    """Runs Triton kernels on CPU tensors.

    Args:
        arithmetic: The choices of the GPU's compiler.
        elements: Largest number of elements in a block, over all Triton programs that run together.
        nans: Records which line computes the first NaN stored by a launch; None to skip the search.

    Attributes:
        arithmetic: The choices of the GPU's compiler.
        elements: Largest number of elements in a block, over all Triton programs that run together. With 1, each
            program runs by itself.
        multiply_adds: Number of elements that fused multiply-adds have computed so far.
    """

    def __init__(self, arithmetic: gpu.Arithmetic, elements: int = ELEMENTS, nans: NanSearch | None = None) -> None:
        self.arithmetic = arithmetic
        self._nans = nans
        self._has_odd = self._stores_nan = False  # programs that run have loaded infinities or NaN, have stored NaN
        self.elements = elements
        self.multiply_adds: int = 0
        self._order, self._configuration = ORDERS[0], 0
        self._access: Any = None  # an `Access` while a kernel runs
        self._batch: Any = None  # a `Batch` while a kernel runs
        functions = libdevice_functions(gpu.unary_functions(arithmetic))
        self._libdevice = {
            getattr(module, name): function
            for module in (libdevice, cuda_libdevice)
            for name, function in functions.items()
            if hasattr(module, name)
        }
        self._rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._codes: set[CodeType] = set()  # of the rewritten functions

    def launch(self, name: str, fn: Callable[..., Any], grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Run a kernel over its grid.

        Args:
            name: Name of the kernel, for errors.
            fn: The Python function under ``triton.jit``.
            grid: Number of Triton programs along each dim, at most three.
            arguments: Arguments by name: tensors on the CPU, and constants.

        Raises:
            IndexError: A program accesses memory outside of the tensors.
            RuntimeError: Two programs access one address, and at least one writes; two atomics are allowed. Or Triton
                refuses an operation.
            ValueError: A descriptor's block is not aligned.
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
        interpreter.interpreter_builder.set_grid_dim(*shape)
        waiting, together = _ordered(self._order, int(np.prod(shape))), 1 if self.elements == 1 else 8
        with _disable_current_modes():  # operators of PyTorch that compute a kernel are no calls of the program
            while waiting:
                largest = self._run(function, values, waiting[:together], shape)
                waiting, together = waiting[together:], max(1, self.elements // largest)
        if np.prod(shape) > 1:
            self._access.assert_no_race()
        self._access = None

    def _run(
        self, function: Callable[..., Any], values: dict[str, Any], programs: Sequence[int], grid: Sequence[int]
    ) -> int:
        self._batch = batch = Batch.of(programs, grid)
        self._access.programs = batch.programs
        recorded, multiply_adds = self._access.mark(), self.multiply_adds

        def undo() -> None:
            batch.undo()
            self._access.forget(recorded)
            self.multiply_adds = multiply_adds

        self._has_odd = self._stores_nan = False
        try:
            function(**values)
            if self._stores_nan and self._nans is not None:
                undo()
                with self._nans.watching(self._access, self._frames):
                    function(**values)
                undo()
                function(**values)
        except Diverged as diverged:
            undo()
            for value in dict.fromkeys(diverged.values.tolist()):
                self._run(function, values, batch.programs[diverged.values == value].tolist(), grid)
        except (AssertionError, ValueError) as error:
            where = f"{self._access.name}: at {self._place(error)}: "
            if isinstance(error, ValueError):
                raise ValueError(f"{where}{error}") from error
            raise RuntimeError(f"{where}Triton raises an error: {error}") from error
        return batch.largest

    def _rewrite(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if fn not in self._rewritten:
            if waits := [name for name in NOT_INTERPRETED if name in fn.__code__.co_names]:
                raise NotImplementedError(
                    f"run_gpu_program: {fn.__name__} calls {waits[0]}, so its programs wait for each other, but the "
                    "simulation runs one program after the other, so it would wait forever. Use a kernel without "
                    "waits between programs."
                )
            if fn not in REWRITTEN:
                found = interpreter.FunctionRewriter(fn).rewrite_ast()
                REWRITTEN[fn] = found.__code__, found.__defaults__
            code, defaults = REWRITTEN[fn]
            scope = {**fn.__globals__, "range": counting(lambda: self._batch)}
            # functions of libdevice that the kernel's module imported by name, or took from a copy of libdevice
            named = {(each.__module__, each.__name__): function for each, function in self._libdevice.items()}
            for name, value in scope.items():
                if not isinstance(value, FunctionType):
                    continue
                if (value.__module__, value.__name__) in named:
                    scope[name] = named[value.__module__, value.__name__]
                elif tl.core.is_builtin(value):  # of the language, imported by name: the one that is patched
                    scope[name] = getattr(sys.modules[value.__module__], value.__name__, value)
            self._rewritten[fn] = FunctionType(code, scope, fn.__name__, defaults)
            self._codes.add(code)
        return self._rewritten[fn]

    @contextmanager
    def active(self, order: str = ORDERS[0], configuration: int = 0) -> Iterator[None]:
        """Context in which ``triton.jit`` functions can be launched and called on the CPU.

        Args:
            order: Order of a launch's Triton programs, one of ``ORDERS``.
            configuration: Number of the configuration for handwritten autotuned kernels; the last one if there are
                fewer.
        """
        self._order, self._configuration = order, configuration
        with ExitStack() as stack:
            patches = [*together(lambda: self._batch)]
            of_tensors = [each for each in patches if each[0] in (tl, tl.core.tensor)]
            of_builder = [each for each in patches if each[0] not in (tl, tl.core.tensor)]
            for owner, name, value in (*of_builder, *self._jit(), *self._memory(), *self._floats(), *reductions()):
                stack.enter_context(mock.patch.object(owner, name, value, create=name in MISSING))
            for original, function in self._libdevice.items():
                owner = sys.modules[original.__module__]
                stack.enter_context(mock.patch.object(owner, original.__name__, function))
            stack.enter_context(np.errstate(all="ignore"))
            # patches the whole language once; the interpreter would do so in each nested call
            scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            stack.callback(scope.restore)
            for owner, name, value in of_tensors:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def _jit(self) -> Iterator[tuple[Any, ...]]:
        """Yield patches for launches of handwritten kernels, and for calls of one jitted function by another."""
        jitted = triton.runtime.jit.JITFunction

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            options = {name for name in kwargs if name not in kernel.arg_names}
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | {
                name: value for name, value in kwargs.items() if name not in options
            }
            self.launch(kernel.__name__, kernel.fn, grid(arguments) if callable(grid) else grid, arguments)

        def run_tuned(tuned: Any, *args: Any, **kwargs: Any) -> Any:
            config = tuned.configs[min(self._configuration, len(tuned.configs) - 1)]
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(tuned.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
            return tuned.fn.run(*args, **kwargs, **config.kwargs)

        yield triton.runtime.Autotuner, "run", run_tuned
        yield jitted, "run", run
        yield jitted, "__call__", lambda function, *args, **kwargs: self._rewrite(function.fn)(*args, **kwargs)

    def _place(self, error: BaseException | None = None) -> str:
        if error is not None:
            steps = reversed(list(traceback.walk_tb(error.__traceback__)))
            path, line = next((frame.f_code.co_filename, line) for frame, line in steps if frame.f_code in self._codes)
        else:
            path, line = next(self._frames())
        return f"{path.rpartition('/')[2]}:{line}"

    def _frames(self) -> Iterator[tuple[str, int]]:
        frame: Any = sys._getframe()  # not by traceback, which is slow: each access comes here
        while frame is not None:
            if frame.f_code in self._codes:
                yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    def _memory(self) -> Iterator[tuple[Any, ...]]:
        def watched(
            kind: str, original: Callable[..., Any], pointers: int, value: int, mask: int
        ) -> Callable[..., Any]:
            def call(builder: Builder, *args: Any, **options: Any) -> Any:
                given, places = list(args), [at for at in (pointers, value, mask) if args[at] is not None]
                for at, data in zip(places, arrays(*(args[at] for at in places)), strict=True):
                    data = data.astype(bool) if at == mask else data  # a mask with a scalar part holds integers
                    data = data if kind == "load" else self._batch.of_each(data)
                    given[at] = Handle(stored(data), args[at].dtype)
                width = max(1, args[pointers].get_element_ty().primitive_bitwidth // 8)
                self._access.record(kind, given[pointers].data, given[mask].data, width, self._place())
                if kind != "load":
                    self._batch.keep(given[pointers].data, given[mask].data, width)
                result = original(builder, *given, **options)
                if self._nans is not None and not self._nans.is_over:
                    if kind == "load":
                        self._has_odd = self._has_odd or is_odd(result)
                    else:
                        self._look_for_nan(given[value], given[mask].data)
                return result

            return call

        yield Builder, "create_masked_load", watched("load", Builder.create_masked_load, 0, 2, 1)
        yield Builder, "create_masked_store", watched("store", Builder.create_masked_store, 0, 1, 2)
        yield Builder, "create_atomic_rmw", watched("atomic", Builder.create_atomic_rmw, 1, 2, 3)
        for name in UNKNOWN:
            if hasattr(Builder, f"create_{name}"):
                yield Builder, f"create_{name}", unknown(name)
        yield Builder, "create_inline_asm", inline_assembly

    def _look_for_nan(self, stored: Handle, mask: np.ndarray) -> None:
        """Note whether ``stored`` has a NaN where ``mask`` is True; if so, the programs run again, watched.

        Bytes that may be the code of a NaN count too, once the programs have loaded an infinity or a NaN.
        """
        found = is_code(stored) if self._has_odd else None
        found = nans(stored) if found is None else found
        if found is not None and found.any():
            self._stores_nan = self._stores_nan or bool((found & mask).any())

    def _converted(self, bits: np.ndarray, source: str, target: str) -> np.ndarray:
        if self.arithmetic.float8_by_float16 and source == "fp32" and target.startswith("fp8"):
            bits = gpu.through_float16(np.asarray(bits).view(np.float32)).view(np.asarray(bits).dtype)
        return gpu.convert(bits, source, target)

    def _floats(self) -> Iterator[tuple[Any, ...]]:
        yield (
            interpreter,
            "_convert_float",
            lambda bits, source, target, _: self._converted(bits, source.name, target.name),
        )
        yield Builder, "cast_impl", _cast
        yield Builder, "create_ashr", _arithmetic_shift
        yield Builder, "create_dot", dot
        yield Builder, "create_dot_scaled", scaled_dot(self.arithmetic.capability)
        yield TritonSemantic, "dot_scaled", with_constant_formats(TritonSemantic.dot_scaled)
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

    def _contraction(self) -> Iterator[tuple[Any, ...]]:
        def multiply(builder: Builder, a: Handle, b: Handle) -> Handle:
            result = builder.binary_op(a, b, np.multiply)
            result.attr["product"] = a.data, b.data
            return result

        def add(builder: Builder, a: Handle, b: Handle, sign: int) -> Handle:
            for x, y, of_product, of_other in ((a, b, 1, sign), (b, a, sign, 1)):
                if "product" in x.attr and x.data.dtype == np.float32:
                    left, right = x.attr["product"]
                    result = gpu.fma(of_product * left, right, of_other * y.data)
                    self.multiply_adds += self._batch.of_each(result).size
                    return Handle(result, a.dtype.scalar)
            return builder.binary_op(a, b, np.add if sign > 0 else np.subtract)

        yield Builder, "create_fmul", multiply
        yield Builder, "create_fadd", lambda self, a, b: add(self, a, b, 1)
        yield Builder, "create_fsub", lambda self, a, b: add(self, a, b, -1)


# ---------------------------------------------------------------------------------- arguments and conversions


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float8_e8m0fnu:
        value = value.view(torch.uint8)  # Inductor passes E8M0 scales as uint8
    if isinstance(value, float):  # the interpreter leaves a number of Python, which has no dtype
        return tl.tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)
    return interpreter._implicit_cvt(value)


def _cast(_: Builder, source: Handle, target: tl.dtype) -> Handle:
    """Convert the handle ``source`` to the number type ``target``; bfloat16 goes through float32."""
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
        raise NotImplementedError(
            f"run_gpu_program: a fused multiply-add of {z.dtype} is not supported; it must be float32."
        )
    return gpu.fma(x, y, z)


def _clamp(builder: Builder, values: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
    if propagate_nan == interpreter._ir.PROPAGATE_NAN.ALL:
        return builder.ternary_op(values, low, high, np.clip)
    return Handle(np.fmin(np.fmax(values.data, low.data), high.data), values.dtype.scalar)


def _without_bfloat16(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(builder: Builder, *args: Any) -> Handle:
        for arg in args[:-1]:
            if arg.dtype.scalar == tl.bfloat16:
                raise NotImplementedError(
                    "run_gpu_program: arithmetic in bfloat16 is not supported, because Inductor computes in float32. "
                    "Cast to float32 first."
                )
        return original(builder, *args)

    return call
