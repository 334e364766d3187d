"""Finds instructions in kernels' PTX that make codes or scales inexact, or use float64 without need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp8compile.testing.gpu.compiled import CompiledKernel, compiled_kernels
from fp8compile.testing.gpu.gpus import check_is_nvidia, gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.ptx import Instruction, Ptx
from fp8compile.testing.gpu.ptx_paths import stored_to, traced
from fp8compile.testing.gpu.scale_paths import written_parameters
from fp8compile.testing.gpu.schedule import schedule

__all__ = ["Finding", "KernelPtx", "kernel_ptx", "ptx_of"]

INEXACT = {
    re.compile(r"\.(approx|full)\b"): "is approximate",
    re.compile(r"\.ftz\b"): "flushes subnormals to zero",
}
FLOAT64 = re.compile(r"^(?!mov|selp|ld|st).*\.f64")
MEANT = {  # allowed float64 instructions, each with its reason
    "cvt.f64.f32": "an amax, or a multiplier, before the division",
    "cvt.f64.f16": "an e4m3 scale, before the division",
    "div.rn.f64": "the multiplier and the scale: a float64 quotient rounded to float32 is the correctly rounded one",
    "cvt.rn.f32.f64": "that rounding",
    "setp.lt.f64": "the smaller of the quotient and the largest float32, or the larger of an amax and its floor",
    "setp.gt.f64": "likewise",
    "setp.nan.f64": "whether one of these is NaN, which stays; from Triton 3.9 on",
}
CONVERSION = re.compile(r"^cvt\..*\.e[45]m[32]x2\.f32")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An instruction that makes codes or scales inexact, or uses float64 without need.

    Attributes:
        kernel: Name and configuration of the kernel.
        instruction: The instruction, with its line in the PTX.
        why: What is wrong with it.
        parameters: Names of the parameters through which the kernel writes codes, scales, or the values from which
            both are computed.
    """

    kernel: str
    instruction: Instruction
    why: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        made_for = f", made for {self.instruction.source}" if self.instruction.source else ""
        return (
            f"{self.kernel}, PTX line {self.instruction.line}: `{self.instruction.text}` {self.why}, on the way to "
            f"{', '.join(self.parameters)}{made_for}"
        )


@dataclass(frozen=True, kw_only=True)
class KernelPtx:
    """What `kernel_ptx` found in the PTX of one compiled kernel.

    Attributes:
        kernel: The kernel in one configuration.
        findings: Instructions that make codes or scales inexact, or use float64 without need.
        code_stores: Maps each parameter through which codes are written to the number of bytes that a thread stores by
            one instruction; the smallest number if stores differ.
    """

    kernel: CompiledKernel
    findings: tuple[Finding, ...]
    code_stores: Mapping[str, int]


def _loops(ptx: Ptx) -> Iterator[range]:
    for each in ptx.instructions:
        start = ptx.labels.get(each.operands[-1], each.line) if each.opcode.startswith("bra") else each.line
        if start < each.line:
            yield range(start, each.line)


def _divides_for_each(ptx: Ptx, lines: range, code_stores: Iterable[Instruction]) -> bool:
    codes = sum(store.bytes for store in code_stores if store.line in lines)
    divisions = sum(each.opcode == "div.rn.f64" for each in ptx.instructions if each.line in lines)
    return 0 < codes <= divisions


def _complaints(
    ptx: Ptx, on_path: Mapping[int, Instruction], code_stores: Iterable[Instruction]
) -> Iterator[tuple[Instruction, str]]:
    stores = list(code_stores)
    loops = [lines for lines in _loops(ptx) if _divides_for_each(ptx, lines, stores)]
    for each in on_path.values():
        yield from ((each, why) for pattern, why in INEXACT.items() if pattern.search(each.opcode))
    for each in ptx.instructions:
        if not FLOAT64.search(each.opcode):
            continue
        if id(each) not in on_path or each.opcode not in MEANT:
            yield each, "computes in float64 what no scale needs"
        elif any(each.line in lines for lines in loops):
            yield each, "computes in float64, in a loop that divides as often as it stores quantized data"


def kernel_ptx(kernel: CompiledKernel, written: Iterable[int]) -> KernelPtx:
    """Find and return instructions in a kernel's PTX that make codes or scales inexact, or use float64 without need.

    Args:
        kernel: A kernel as `compiled_kernels` or `compiled_jit` returns it.
        written: Positions of the arguments through which the kernel writes codes, scales, or the values from which
            both are computed. Positions of arguments that are no pointers are ignored.

    Raises:
        NotImplementedError: The kernel has an unsupported instruction.
    """
    ptx, arguments = Ptx(kernel.ptx), list(kernel.arguments.items())
    pointers = [number for number in sorted(written) if arguments[number][1].startswith("*")]
    stores = {arguments[number][0]: found for number in pointers if (found := stored_to(ptx, [number]))}
    paths = {name: traced(ptx, found) for name, found in stores.items()}
    codes = [name for name, path in paths.items() if any(CONVERSION.match(each.opcode) for each in path)]
    on_path = {id(each): each for path in paths.values() for each in path}
    in_codes = [store for name in codes for store in stores[name]]
    return KernelPtx(
        kernel=kernel,
        findings=tuple(
            Finding(kernel=str(kernel), instruction=each, why=why, parameters=tuple(stores))
            for each, why in _complaints(ptx, on_path, in_codes)
        ),
        code_stores={name: min(store.bytes for store in stores[name]) for name in codes},
    )


def ptx_of(fn: Callable[..., Any], *args: Any, arch: str = "h200", most: int | None = 1) -> list[KernelPtx]:
    """Find PTX instructions of ``fn(*args)`` and backward that make codes or scales inexact, or use needless float64.

    Args:
        fn: A module or function in bfloat16 or float16, see `fp8compile.testing.gpu.ptx_paths`.
        args: The arguments of ``fn``, on the CPU; fake tensors for sizes that don't fit in memory.
        arch: The GPU, a key of ``fp8compile.testing.gpu.gpus.GPUS``.
        most: How many configurations of each kernel to check, starting with the first; None for all.

    Raises:
        ValueError: There is no such GPU, or the GPU is AMD's.
        ModuleNotFoundError: Triton is not installed.
        NotImplementedError: A kernel has an unsupported instruction, or a block is compiled as a region.
        RuntimeError: This version of PyTorch prints code in a form that isn't known here.
    """
    gpu = gpu_called(arch)
    check_is_nvidia(gpu, "ptx_of")
    graphs = gpu_graphs(fn, args, gpu)
    schedules = [schedule(graph, gpu) for graph in graphs]
    written = written_parameters(graphs, schedules)
    return [
        kernel_ptx(kernel, parameters[kernel.name])
        for scheduled, parameters in zip(schedules, written, strict=True)
        for kernel in compiled_kernels(scheduled.source, gpu, most=most)
    ]
