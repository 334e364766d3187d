"""Registers, spills and shared memory of Triton kernels, from Triton's own ptxas, without the GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8compile.testing.gpu.compiled import CompiledKernel, compiled_jit, compiled_kernels
from fp8compile.testing.gpu.gpus import Gpu, check_is_nvidia

__all__ = ["KernelResources", "assembled", "disassembled", "jit_resources", "kernel_resources"]

REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Registers, spills and shared memory of a kernel in one configuration.

    Attributes:
        name: Name of the kernel.
        config: Block sizes of the configuration.
        num_warps: Number of warps, of 32 threads each.
        registers: Number of registers that each thread uses.
        spilled_bytes: Bytes that each thread stores and loads because registers do not suffice.
        shared_bytes: Bytes of shared memory that each Triton program uses.
    """

    name: str
    config: dict[str, int]
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def __str__(self) -> str:
        blocks = ", ".join(f"{name} {size}" for name, size in self.config.items())
        spills = f"{self.spilled_bytes} bytes spilled" if self.spilled_bytes else "no spills"
        return (
            f"{self.name} ({blocks}, {self.num_warps} warps): {self.registers} registers, {spills}, "
            f"{self.shared_bytes} bytes shared"
        )


def _ptxas(ptx: str, gpu: Gpu, cubin: str) -> str:
    """Assemble PTX to the file ``cubin``, and return what ptxas reports."""
    from triton.backends.nvidia.compiler import get_ptxas

    check_is_nvidia(gpu, "resources(), by ptxas,")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        name = f"sm_{gpu.cc}a" if gpu.major >= 9 else f"sm_{gpu.cc}"  # 9.0 and later have instructions of their own
        command = [get_ptxas(gpu.cc).path, "-v", f"--gpu-name={name}", str(path), "-o", cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembled(kernel: CompiledKernel, gpu: Gpu) -> str:
    """Assemble a compiled kernel, and return its machine code (SASS) as text of nvdisasm."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernel.cubin"
        _ptxas(kernel.ptx, gpu, cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assembled(kernel: CompiledKernel, gpu: Gpu) -> KernelResources:
    """Assemble a compiled kernel, and return its registers, spills and shared memory."""
    said = _ptxas(kernel.ptx, gpu, "/dev/null")
    spilled = SPILLS.search(said)
    return KernelResources(
        name=kernel.name,
        config=kernel.config,
        num_warps=kernel.num_warps,
        registers=int(REGISTERS.findall(said)[0]),
        spilled_bytes=sum(map(int, spilled.groups())) if spilled else 0,
        shared_bytes=kernel.shared_bytes,
    )


def kernel_resources(source: str, gpu: Gpu) -> list[KernelResources]:
    """Compile the Triton kernels of generated code for a GPU, and return the resources they use.

    Args:
        source: The code that Inductor generated, as in `GpuCode.source`.
        gpu: The GPU.

    Returns:
        The resources of each kernel in each configuration that Inductor would time on the GPU.

    Raises:
        ValueError: The GPU is AMD's.
        ModuleNotFoundError: Triton is not installed.
    """
    return [assembled(kernel, gpu) for kernel in compiled_kernels(source, gpu)]


def jit_resources(
    fn: Any, kinds: dict[str, str], constants: dict[str, Any], *, num_warps: int, gpu: Gpu
) -> KernelResources:
    """Registers, spills and shared memory of a ``triton.jit`` function, compiled but not launched.

    ``kinds`` has Triton's types of arguments, such as "*bf16"; ``constants`` has values of ``tl.constexpr`` arguments.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    return assembled(compiled_jit(fn, kinds, constants, num_warps=num_warps, gpu=gpu), gpu)
