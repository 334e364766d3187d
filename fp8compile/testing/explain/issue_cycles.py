"""Issue cycles of a kernel, compared with the cycles that its memory traffic takes: from SASS, without the GPU.

A multiprocessor issues at most 4 warp instructions a cycle, and about 2 in practice. A kernel limited by memory should
therefore need at most 0.7 of its memory cycles to issue its instructions at 4 a cycle. Both numbers are of the hot
code of one thread: of the loop that moves most bytes, or of the whole kernel if no loop moves half of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp8compile.testing.explain.roofline import PEAKS
from fp8compile.testing.gpu.compiled import CompiledKernel
from fp8compile.testing.gpu.cubin import disassembled
from fp8compile.testing.gpu.gpus import GPUS

__all__ = ["CLOCKS", "MOST", "IssueCycles", "issue_cycles", "of_sass"]

MOST = 0.7  # the largest ratio of a good kernel
ISSUED = 4  # warp instructions that a multiprocessor issues each cycle
REACHED = 0.71  # part of the published bandwidth that a copy reaches: 3.4 of an H200's 4.8 TB/s
FLOAT64 = ("DADD", "DFMA", "DMUL", "DSETP")
# for each GPU, GHz under load, and how many float64 instructions of a warp a multiprocessor starts each cycle
CLOCKS = {"h200": (1.755, 2.0), "h100": (1.755, 2.0), "rtx5090": (2.41, 1 / 16)}
# a label, or an instruction without its address and predicate
LINE = re.compile(r"^(\.L_x_\d+|\$\S+):|/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S[^;]*?)\s*;", re.MULTILINE)
PRODUCT = re.compile(r"(?:UTC)?[DFHIOQ]G?MMA\b")  # an instruction of the tensor cores
BRANCH = re.compile(r"^BRA\b.*`\((\.L_x_\d+)\)")
WIDTH = re.compile(r"\.[US]?(8|16|64|128)\b")


@dataclass(frozen=True, kw_only=True)
class IssueCycles:
    """What a kernel issues and moves; the counts are of its hot code.

    Attributes:
        name: Name of the kernel.
        instructions: Number of instructions of each thread.
        float64: How many of them compute in float64.
        bytes_moved: Bytes that each thread loads from and stores to global memory.
        ratio: Issue cycles, or cycles of the float64 units if these are more, divided by cycles that memory takes.
        has_tensor_cores: Whether the kernel multiplies on tensor cores, whose time the ratio does not count.
        spills_in_loop: Number of accesses to local memory in loops that multiply on tensor cores.
    """

    name: str
    instructions: int
    float64: int
    bytes_moved: int
    ratio: float
    has_tensor_cores: bool
    spills_in_loop: int


def _bytes_moved(instructions: Sequence[str]) -> int:
    """Count the bytes that a thread moves. Accesses of 4 bytes, offsets and scales, do not count beside wider ones."""
    found = [WIDTH.search(each.split()[0]) for each in instructions if each.startswith(("LDG.", "STG.", "LDGSTS."))]
    widths = [int(width[1]) // 8 if width else 4 for width in found]
    return sum(width for width in widths if width != 4 or max(widths) == 4)


def _code_and_loops(sass: str) -> tuple[list[str], list[list[str]]]:
    """Return a kernel's instructions, without subroutines (the slow paths of divisions), and those of each loop."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for label, instruction in LINE.findall(sass):
        if label.startswith("$"):
            break
        if label:
            labels[label] = len(code)
            continue
        code.append(instruction)
        branch = BRANCH.search(instruction)
        start = labels.get(branch[1], len(code)) if branch else len(code)
        if start < len(code) - 1:  # behind the last instruction, nvdisasm shows a branch to itself
            loops.append(code[start:])
    return code, loops


def of_sass(name: str, sass: str, arch: str) -> IssueCycles:
    """Count what a kernel issues and moves.

    Args:
        name: Name of the kernel.
        sass: Its machine code, as nvdisasm shows it.
        arch: The GPU, a key of ``CLOCKS``.
    """
    gpu, (clock, float64_rate) = GPUS[arch], CLOCKS[arch]
    code, loops = _code_and_loops(sass)
    products = [loop for loop in loops if any(map(PRODUCT.match, loop))]
    most = max(loops, key=_bytes_moved, default=[])
    hot = most if 2 * _bytes_moved(most) >= _bytes_moved(code) else code
    bytes_moved, float64 = _bytes_moved(hot), sum(each.startswith(FLOAT64) for each in hot)
    bytes_a_cycle = REACHED * PEAKS[arch].bandwidth / (clock * 1e9) / gpu.multi_processor_count
    cycles = max(len(hot) / ISSUED, float64 / float64_rate)  # of one warp
    return IssueCycles(
        name=name,
        instructions=len(hot),
        float64=float64,
        bytes_moved=bytes_moved,
        ratio=cycles * bytes_a_cycle / (bytes_moved * gpu.warp_size) if bytes_moved else 0.0,
        has_tensor_cores=any(map(PRODUCT.match, code)),
        spills_in_loop=sum(each.startswith(("LDL", "STL")) for loop in products for each in loop),
    )


def issue_cycles(kernel: CompiledKernel, arch: str) -> IssueCycles:
    """Assemble a compiled kernel, and count what it issues and moves; ``arch`` is a key of ``CLOCKS``."""
    return of_sass(kernel.name, disassembled(kernel, GPUS[arch]), arch)
