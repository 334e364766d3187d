"""Compiles Triton kernels that this package's operators launch in a generated program, for its GPU.

Inductor doesn't see these kernels: its code calls an operator. Here the operator's implementation runs on tensors
without data, and each launch is compiled for the shapes, strides and dtypes of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from fp8compile.ops import FOUR_BIT_PRODUCTS
from fp8compile.ops.registry import OPS
from fp8compile.target import pretend_target
from fp8compile.testing.gpu.compiled import CompiledKernel, compiled_jit
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.schedule import Schedule
from fp8compile.testing.graphs.recording import node_value, op_name

__all__ = ["launched_kernels"]

ALIGNED = 16  # Triton compiles another kernel for pointers and sizes that are multiples of this number
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.float8_e8m0fnu: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    """A launch of a ``triton.jit`` function: its arguments by name, and options such as warps and stages."""

    fn: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def compiled(self, gpu: Gpu) -> CompiledKernel:
        """Compile the launched kernel for a GPU; as in Triton, arguments equal to 1 become constants."""
        is_constant = {each.name: each.is_constexpr for each in self.fn.params}
        constants, kinds, aligned = {}, {}, []
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                kinds[name] = POINTERS[value.dtype]
                aligned.append(name)
            elif is_constant[name] or value is None or value == 1:
                constants[name] = value
            else:
                kinds[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
                aligned += [name] if value % ALIGNED == 0 else []
        return compiled_jit(self.fn, kinds, constants, gpu=gpu, aligned=aligned, **self.options)


@contextmanager
def _recorded() -> Iterator[list[_Launch]]:
    """Context that yields a list which collects launches of ``triton.jit`` functions instead of running them."""
    from triton.runtime.jit import JITFunction

    found: list[_Launch] = []

    def run(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(fn.arg_names, args, strict=False)) | kwargs
        options = {name: given.pop(name) for name in kwargs if name not in fn.arg_names}
        found.append(_Launch(fn, given, options))

    with mock.patch.object(JITFunction, "run", run):
        yield found


def _on_the_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def launched_kernels(found: Schedule, gpu: Gpu) -> Iterator[CompiledKernel]:
    """Yield the compiled kernels that this package's operators launch in a graph, each distinct one once.

    Args:
        found: Inductor's schedule of the graph.
        gpu: The GPU that the schedule is for.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    compiled: set[str] = set()
    for node in found.lowered.nodes:
        op = OPS.get(op_name(node.target)) if node.op == "call_function" else None
        if op is None or op.overload in FOUR_BIT_PRODUCTS:  # PyTorch multiplies in those
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), node_value)
        fakes: list[Any] = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        mode = fakes[0].fake_mode
        with pretend_target(gpu.target), mode, _recorded() as launches:
            op.impl(*tree_map(_on_the_cpu, list(args)), **kwargs)
        for launch in launches:
            kernel = launch.compiled(gpu)
            if kernel.ptx not in compiled:
                compiled.add(kernel.ptx)
                yield kernel
