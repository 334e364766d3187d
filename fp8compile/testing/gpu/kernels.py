"""gpu_kernels: generates Inductor's code for a GPU, on a machine without one.

Generated code shows which operators were fused, how many kernels there are and what they read and write. It does not
show how long kernels take. With fake tensors nothing is computed or allocated, so a layer of full size takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp8compile.testing.gpu.cubin import KernelResources, kernel_resources
from fp8compile.testing.gpu.gpus import Gpu, gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import Schedule, operator_of, schedule

__all__ = ["GpuCode", "Launch", "gpu_kernels"]

KERNEL = re.compile(r"^(\w+) = async_compile\.triton\(", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel or library call that the generated code starts.

    Attributes:
        name: Name of the Triton kernel, or of the operator that is called.
        kind: "triton" for generated code and Triton kernels of others, "gemm" for a GEMM, "opaque" for any other
            operator, whose launches Inductor doesn't know.
        ops: Names of the operators that the launch computes, in order, before decomposition.
        bytes_read: Bytes read; each buffer counts once.
        bytes_written: Bytes written; each buffer counts once.
        op: The operator whose Triton kernel is launched instead of a call, such as "fp8compile.group_cast.default";
            empty for generated code, and for calls.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    op: str = ""

    def __str__(self) -> str:
        moved = f"{self.bytes_read / 1e6:.3f} MB read, {self.bytes_written / 1e6:.3f} MB written"
        return f"{self.kind} {self.name}: {moved}, {', '.join(self.ops) or 'no operator of the graph'}"


@dataclass(frozen=True)
class GpuCode:
    """The code of one graph as Inductor would run it.

    Attributes:
        source: The generated Python file: Triton kernels, and the code that launches them and calls libraries.
        bytes: Bytes that kernels and library calls read and write; Inductor counts each buffer once per kernel.
        launches: Kernels and library calls in order.
        gpu: The GPU that the code is for.
        no_cuda_graph: The reason why Inductor would not use a CUDA graph; None if it would.
        mutated_inputs: Positions of the arguments that the graph writes to. A backward's arguments other than
            gradients keep their addresses, so a CUDA graph may write to them.
    """

    source: str
    bytes: int
    launches: tuple[Launch, ...]
    gpu: Gpu
    no_cuda_graph: str | None = None
    mutated_inputs: tuple[int, ...] = ()

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of the distinct Triton kernels."""
        return tuple(KERNEL.findall(self.source))

    @cached_property
    def gemms(self) -> tuple[str, ...]:
        """Names of the GEMMs' operators, without their namespaces, one entry per GEMM."""
        names = (launch.op or launch.name for launch in self.launches if launch.kind == "gemm")
        return tuple(name.removesuffix(".default").rpartition(".")[2] for name in names)

    def kernel(self, name: str) -> str:
        """Source of the Triton kernel called ``name``; of a handwritten one, also its configurations and helpers."""
        start = self.source.index(f"{name} = async_compile.triton(")
        _, text, _ = self.source[start:].split("'''", 2)
        return text[max(0, text.find(f"def {name}(")) :]

    def resources(self) -> list[KernelResources]:
        """Registers and spills of the Triton kernels, from Triton's ptxas; takes seconds per kernel.

        Returns:
            An entry for each kernel in each configuration that Inductor would time on the GPU.
        """
        return kernel_resources(self.source, self.gpu)

    def __str__(self) -> str:
        return f"{len(self.kernels)} Triton kernels, {len(self.gemms)} GEMMs, {self.bytes / 1e9:.2f} GB"


def _code(found: Schedule, gpu: Gpu) -> GpuCode:
    launches = tuple(
        Launch(
            name=launch.name,
            kind=launch.kind,
            ops=tuple(dict.fromkeys(map(operator_of, found.computed(launch)))),
            bytes_read=launch.bytes_read,
            bytes_written=launch.bytes_written,
            op=launch.op,
        )
        for launch in found.launches
    )
    return GpuCode(found.source, found.bytes, launches, gpu, found.no_cuda_graph, found.mutated_inputs)


def gpu_kernels(fn: Callable[..., Any], *args: Any, arch: str = "h200") -> list[GpuCode]:
    """Generate Inductor's code for ``fn(*args)`` and its backward on a GPU.

    The function is traced with ``fullgraph=True`` and computes nothing. All earlier compiled graphs are dropped
    (``torch._dynamo.reset``). For sizes that don't fit in memory, make arguments and parameters under
    ``torch._subclasses.fake_tensor.FakeTensorMode``, and call this inside it.

    Args:
        fn: A module or function.
        args: The arguments of ``fn``, on the CPU.
        arch: The GPU, a key of ``fp8compile.testing.gpu.gpus.GPUS``, or an architecture such as "sm_120".

    Returns:
        The code of the forward and, if an output requires grad, of the backward.

    Raises:
        ValueError: There is no such GPU, or a size in a graph depends on data.
        NotImplementedError: A block of the model is compiled as a region.
        ModuleNotFoundError: Triton is not installed.
        RuntimeError: This version of PyTorch prints code in a form that isn't known here.
    """
    gpu = gpu_called(arch)
    return [_code(schedule(graph, gpu), gpu) for graph in gpu_graphs(fn, args, gpu)]
