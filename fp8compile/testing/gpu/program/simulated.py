"""Simulates a GPU's GEMMs on the CPU: checks operands as the GPU's library would, and multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.products import BY_OUR_KERNEL, Products, is_product

__all__ = ["simulated_products"]


class _Played(TorchDispatchMode):
    def __init__(self, gpu: Gpu, *, interprets: bool) -> None:
        super().__init__()
        self._products, self._interprets = Products(gpu), interprets

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = op._schema.name.partition("::")[2]
        if is_product(op) and not (self._interprets and name == BY_OUR_KERNEL):
            return self._products.multiply(name, *args, **(kwargs or {}))
        return op(*args, **(kwargs or {}))


@contextmanager
def simulated_products(gpu: Gpu, *, interpret: bool = False) -> Iterator[None]:
    """Context in which this package's GEMMs are chosen as on a GPU, and simulated on the CPU.

    A GEMM with operands that the GPU's library would refuse raises a ValueError. Results are summed in float64 and
    rounded once, except grouped products with block scales, which are summed in float32.

    Args:
        gpu: The GPU.
        interpret: Whether this package's Triton kernel for grouped GEMMs runs in Triton's interpreter. If not, the
            same operator's CPU kernel runs.

    Raises:
        ModuleNotFoundError: Triton is not installed, and ``interpret`` is True.
    """
    with ExitStack() as stack:
        stack.enter_context(pretend_target(gpu.target))
        if interpret:
            from fp8compile.testing.gpu.program.arithmetic import Arithmetic
            from fp8compile.testing.gpu.program.interpreter import Interpreter

            stack.enter_context(Interpreter(Arithmetic(capability=gpu.target.capability)).active())
        stack.enter_context(_Played(gpu, interprets=interpret))
        yield
