"""Registers and spills of Triton kernels: compiled for the GPU by Triton's own ptxas, without the GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8compile.testing.gpus import Gpu, pretend_gpu

__all__ = ["KernelResources", "jit_resources", "kernel_resources"]

KERNEL_SOURCE = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", re.MULTILINE | re.DOTALL)
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """One kernel in one of the configurations that Inductor would choose from.

    Attributes:
        name: Of the kernel.
        config: Its block sizes.
        num_warps: Of 32 threads each.
        registers: A thread's.
        spilled_bytes: A thread's, stored and loaded: registers that did not suffice.
    """

    name: str
    config: dict[str, int]
    num_warps: int
    registers: int
    spilled_bytes: int

    def __str__(self) -> str:
        blocks = ", ".join(f"{name} {size}" for name, size in self.config.items())
        spills = f"{self.spilled_bytes} bytes spilled" if self.spilled_bytes else "no spills"
        return f"{self.name} ({blocks}, {self.num_warps} warps): {self.registers} registers, {spills}"


def _loaded(name: str, source: str, folder: str) -> ModuleType:
    path = Path(folder) / f"{name}.py"
    path.write_text(re.sub(r"\s*triton_helpers\.set_driver_to_gpu\(\)", "", source))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ptx(
    fn: Any, kinds: dict[str, str], constants: dict[str, Any], attributes: dict, options: dict[str, int], gpu: Gpu
) -> str:
    """PTX of a jitted function; ``kinds`` are types of its arguments, such as "*bf16" and "i32"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=fn,
        signature={name: "constexpr" if name in constants else kinds[name] for name in fn.arg_names},
        constexprs={(fn.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", gpu.cc, gpu.warp_size), options=options).asm["ptx"]


def _generated_ptx(tuner: Any, config: Any, gpu: Gpu) -> str:
    """PTX of a kernel that Inductor generated, in one of its configurations."""
    meta, fn = tuner.triton_meta, tuner.fn
    constants = {name: value for name, value in config.kwargs.items() if name in fn.arg_names}
    for name, value in meta.get("constants", {}).items():
        constants[name if isinstance(name, str) else fn.arg_names[name]] = value
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return _ptx(fn, meta["signature"], constants, meta["configs"][0], options, gpu)


def _ptxas(ptx: str, gpu: Gpu, folder: str) -> tuple[int, int]:
    """Registers and spilled bytes, as the assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = Path(folder) / "kernel.ptx"
    path.write_text(ptx)
    command = [get_ptxas(gpu.cc).path, "-v", f"--gpu-name=sm_{gpu.cc}a", str(path), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = SPILLS.search(said)
    return int(REGISTERS.search(said)[1]), sum(map(int, spilled.groups())) if spilled else 0


def _of_kernel(name: str, source: str, folder: str, gpu: Gpu) -> Iterator[KernelResources]:
    module = _loaded(name, source, folder)
    tuner = next(value for value in vars(module).values() if type(value).__name__.endswith("Autotuner"))
    for config in tuner.configs:
        registers, spilled = _ptxas(_generated_ptx(tuner, config, gpu), gpu, folder)
        yield KernelResources(
            name=name,
            config=dict(config.kwargs),
            num_warps=config.num_warps,
            registers=registers,
            spilled_bytes=spilled,
        )


def kernel_resources(source: str, gpu: Gpu) -> list[KernelResources]:
    """Compile the Triton kernels of generated code for a GPU; nothing is launched.

    Args:
        source: What Inductor generated, `GpuCode.source`.
        gpu: The GPU.

    Returns:
        Each kernel in each configuration that Inductor would time on the GPU.

    Raises:
        ModuleNotFoundError: There is no Triton.
    """
    with tempfile.TemporaryDirectory() as folder, pretend_gpu(gpu):
        kernels = KERNEL_SOURCE.findall(source)
        return [found for name, text in kernels for found in _of_kernel(name, text, folder, gpu)]


def jit_resources(
    fn: Any, kinds: dict[str, str], constants: dict[str, Any], *, num_warps: int, gpu: Gpu
) -> KernelResources:
    """Compile a function under ``triton.jit`` for a GPU; nothing is launched.

    Args:
        fn: The function.
        kinds: Triton's type of each argument that is no constant, such as "*bf16" and "i32"; pointers and sizes are
            taken for multiples of 16.
        constants: Its ``tl.constexpr`` arguments.
        num_warps: Of 32 threads each.
        gpu: The GPU.

    Raises:
        ModuleNotFoundError: There is no Triton.
    """
    aligned = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in kinds}
    with tempfile.TemporaryDirectory() as folder, pretend_gpu(gpu):
        ptx = _ptx(fn, kinds, constants, aligned, {"num_warps": num_warps}, gpu)
        registers, spilled = _ptxas(ptx, gpu, folder)
    sizes = {name: value for name, value in constants.items() if type(value) is int}
    return KernelResources(
        name=fn.__name__, config=sizes, num_warps=num_warps, registers=registers, spilled_bytes=spilled
    )
