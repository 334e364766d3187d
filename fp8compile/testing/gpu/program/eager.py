"""eager_run: eager mode on the CPU with GEMMs rounded once, to compare with ``run_gpu_program``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import Gpu, gpu_called
from fp8compile.testing.gpu.program.libraries import operator_called
from fp8compile.testing.gpu.program.messages import message
from fp8compile.testing.gpu.program.operators import computed
from fp8compile.testing.gpu.program.products import Products, is_product
from fp8compile.testing.gpu.program.step import step

__all__ = ["EagerRun", "eager_run"]


@dataclass(frozen=True)
class EagerRun:
    """The results of a function in eager mode.

    Attributes:
        outputs: The output tensors.
        gradients: Gradients by name, as in a `GpuRun`.
    """

    outputs: tuple[Tensor, ...] = field(repr=False)
    gradients: dict[str, Tensor] = field(repr=False)


def _exact(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any, out_dtype: Any = None, **__: Any
) -> Tensor:
    """Replacement of `torch._scaled_mm`: multiplies in float64, and rounds once to ``out_dtype``.

    Scales must broadcast against the operands: one scale, or one for each row of ``a`` and each column of ``b``.
    """
    out_dtype = next((each for each in _ if isinstance(each, torch.dtype)), out_dtype)
    return ((a.double() * scale_a.double()) @ (b.double() * scale_b.double())).to(out_dtype)


class _Eager(TorchDispatchMode):
    """Dispatch mode that multiplies in float64 and emulates collectives, also inside this library's ops."""

    def __init__(self, gpu: Gpu | None) -> None:
        super().__init__()
        from torch._inductor.decomposition import select_decomp_table

        self._gpu, self._products, self._parts = gpu, Products(gpu, interprets=True), select_decomp_table()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = op._schema.name.partition("::")
        if types and any(each is not Tensor and each is not torch.nn.Parameter for each in types):
            return NotImplemented  # the subclass unwraps itself while this mode is on, and then calls come here
        if namespace == "_c10d_functional":
            return message(op, *args, **kwargs)
        if name == "_scaled_mm" and self._gpu is None:
            return _exact(*args, **kwargs)
        if is_product(op):
            return self._products.multiply(name, *args, **kwargs)
        if own := operator_called(op._schema.name):
            with self:
                return own(*args, **kwargs)
        if name in ("matmul", "linear"):  # below the autograd key these operators arrive undecomposed
            with self:
                return op.decompose(*args, **kwargs)
        return self._computed(op, args, kwargs) if _is_float(args) else op(*args, **kwargs)

    def _computed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op in self._parts:
            with self:
                result = self._parts[op](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return computed(op, args, kwargs)


def _is_float(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype.itemsize in (2, 4) for arg in args)


def eager_run(
    fn: Callable[..., Any], *args: Any, arch: str | None = None, grad_outputs: Sequence[Tensor] | None = None
) -> EagerRun:
    """Run ``fn(*args)`` and its backward in eager mode on this machine's CPU, with GEMMs rounded once.

    The result is bit-identical to `run_gpu_program` with ``precision_casts``, except where Inductor adds a bias after
    rounding the result of the GEMM. As in `run_gpu_program`, operators that Inductor decomposes are decomposed, sums
    are rounded once, and functional collectives are emulated.

    Args:
        fn: A module or function.
        args: The arguments of ``fn``, on the CPU.
        arch: The GPU for which FP8 layers choose their GEMMs, a key of ``fp8compile.testing.gpu.gpus.GPUS``; None for
            a CPU's GEMMs. The choice changes bits if scales are applied after the GEMM (rowwise in float32 and
            float16).
        grad_outputs: Gradients of the outputs, as for `run_gpu_program`.

    Raises:
        ValueError: The GPU is unknown, or its GEMM does not support the operands.
        ModuleNotFoundError: Triton is not installed, and ``arch`` is given.
    """
    gpu = None if arch is None else gpu_called(arch)
    with ExitStack() as stack:
        if gpu is not None:
            from fp8compile.testing.gpu.program.arithmetic import Arithmetic
            from fp8compile.testing.gpu.program.interpreter import Interpreter

            stack.enter_context(pretend_target(gpu.target))
            stack.enter_context(Interpreter(Arithmetic(capability=gpu.target.capability)).active())
        stack.enter_context(_Eager(gpu))
        return EagerRun(*step(fn, fn, args, grad_outputs))
