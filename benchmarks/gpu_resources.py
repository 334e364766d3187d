"""Registers, spills and shared memory of every kernel of a program, for each GPU: assembled by ptxas, without the GPU.

    python -m benchmarks.gpu_resources [--gpus rtx4090 h100 ...] [--blocks feed-forward experts]

writes docs/results/gpu-resources.md, a row for each GPU, block and recipe. The block is compiled for the GPU, forward
and backward. Triton compiles the kernels that Inductor generates and those that our operators launch, and the ptxas
that Triton brings assembles them for the GPU's architecture. Inductor times several configurations of a kernel on the
GPU and takes the fastest; the one here is the first that fits. A row that isn't made again stays as it was. The exit
status is 1 if a kernel has no configuration that fits. `compile_tests/test_gpu_resources.py` makes the same rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.mlp import Mlp
from fp8compile.testing.explain.issue_cycles import CLOCKS, issue_cycles
from fp8compile.testing.gpu.compiled import CompiledKernel, compiled_kernels, halved, unpipelined
from fp8compile.testing.gpu.cubin import KernelResources, assembled
from fp8compile.testing.gpu.gpus import GPUS, Gpu
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import Schedule, schedule

__all__ = ["BLOCKS", "RECIPES", "Resources", "main", "resources_of"]

PAGE = Path(__file__).parents[1] / "docs" / "results" / "gpu-resources.md"
MADE = tuple[Callable[..., Any], tuple[Any, ...]]
HEAD = """# Kernels of each GPU, assembled without it

Written by `python -m benchmarks.gpu_resources`: a block is compiled for the GPU, forward and
backward, and Triton's own ptxas assembles each kernel. Of these only an
[H200](h200.md) has run any.

- *feed-forward*: RMSNorm, SwiGLU and residual, 8192 tokens, 4096 x 14336.
- *experts*: gate and up, SwiGLU, down; 8192 rows, 16 experts of 2048 x 768.
- *generated*: kernels of Inductor, each in its first configuration that fits. Two that Inductor
  adds on the GPU count too: half the block of a reduction, and no pipelining.
- *ours*: kernels that fp8compile's operators launch.
- *issue / bytes*: cycles to issue a kernel's instructions, divided by those that its bytes take; the
  largest of the kernels without tensor cores that move a MB or more. Above 0.7 a kernel can't reach
  the GPU's bandwidth. Empty for GPUs whose clocks the model does not have.
- *fits*: no register is spilled, a program's registers suffice, and its shared memory is at most
  that of the GPU (*limit*).
"""
COLUMNS = (
    "GPU", "block", "recipe", "generated", "ours", "most registers", "bytes spilled", "most KiB shared", "limit",
    "fits", "most issue / bytes",
)  # fmt: skip


def _feed_forward(recipe: str) -> MADE:
    model = f8.convert(Mlp(4096, 14336), f8.recipes.by_name(recipe), filter="*")
    return model, (torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True),)


def _experts(recipe: str) -> MADE:
    return partial(feed_forward, recipe=f8.recipes.by_name(recipe)), experts_arguments(8192, 2048, 768, 16)


BLOCKS: dict[str, Callable[[str], MADE]] = {"feed-forward": _feed_forward, "experts": _experts}
# for each GPU, the recipes of docs/recipes.md for its linear layers and for its experts
RECIPES = {
    "rtx4090": {"feed-forward": ("tensorwise", "rowwise"), "experts": ("rowwise", "blockwise")},
    "h100": {"feed-forward": ("rowwise", "blockwise"), "experts": ("rowwise", "blockwise")},
    "b200": {"feed-forward": ("mxfp8", "nvfp4"), "experts": ("mxfp8", "nvfp4")},
    "b300": {"feed-forward": ("mxfp8", "nvfp4"), "experts": ("mxfp8", "nvfp4")},
    "rtx5090": {"feed-forward": ("mxfp8", "rowwise"), "experts": ("rowwise", "blockwise")},
    "gb10": {"feed-forward": ("mxfp8", "rowwise"), "experts": ("rowwise", "blockwise")},
}


LARGE = 1 << 20  # bytes; kernels that move fewer take microseconds


@dataclass(frozen=True)
class Resources:
    """The kernels of a block on a GPU.

    Attributes:
        gpu: The GPU.
        generated: The kernels that Inductor generated.
        ours: The kernels that operators of this package launch.
        slowest: The largest ratio of issue cycles to memory cycles, and its kernel; None without a model of the GPU.
    """

    gpu: Gpu
    generated: tuple[KernelResources, ...]
    ours: tuple[KernelResources, ...]
    slowest: tuple[float, str] | None

    @property
    def unfit(self) -> list[str]:
        """A line for each kernel that spills, or needs more than the GPU has."""
        return [str(each) for each in (*self.generated, *self.ours) if not _fits(each, self.gpu)]

    def cells(self) -> list[str]:
        """The row of the table, from the number of kernels on."""
        every = (*self.generated, *self.ours)
        numbers = (
            len(self.generated),
            len(self.ours),
            max(each.registers for each in every),
            sum(each.spilled_bytes for each in every),
            -(-max(each.shared_bytes for each in every) >> 10) if every else 0,
            self.gpu.shared_memory_per_block_optin >> 10,
        )
        ratio = "" if self.slowest is None else f"{self.slowest[0]:.2f}, {self.slowest[1]}"
        return [*map(str, numbers), "no" if self.unfit else "yes", ratio]


def _fits(kernel: KernelResources, gpu: Gpu) -> bool:
    registers = kernel.registers * kernel.num_warps * gpu.warp_size
    return (
        kernel.spilled_bytes == 0
        and registers <= gpu.regs_per_multiprocessor
        and kernel.shared_bytes <= gpu.shared_memory_per_block_optin
    )


def _that_fit(found: Schedule, gpu: Gpu) -> Iterator[tuple[KernelResources, CompiledKernel]]:
    """Each kernel in its first configuration that fits, or in its first one if none does.

    Those that Inductor adds on the GPU are tried too: half the block of a reduction where registers are many, and no
    pipelining where shared memory is short.
    """
    first = {each.name: (assembled(each, gpu), each) for each in compiled_kernels(found.source, gpu, most=1)}
    unfit = {name for name, (kernel, _) in first.items() if not _fits(kernel, gpu)}
    for change in (None, halved, unpipelined):
        for each in compiled_kernels(found.source, gpu, change=change) if unfit else ():
            if each.name in unfit and _fits(kernel := assembled(each, gpu), gpu):
                first[each.name] = kernel, each
                unfit.remove(each.name)
    yield from first.values()


def _slowest(kernels: list[CompiledKernel], arch: str) -> tuple[float, str] | None:
    if arch not in CLOCKS:
        return None
    counts = [issue_cycles(each, arch) for each in kernels]
    return max((each.ratio, each.name) for each in counts if not each.has_tensor_cores)


def resources_of(arch: str, block: str, recipe: str) -> Resources:
    """Compile a block for a GPU, forward and backward, and assemble its kernels.

    Args:
        arch: The GPU, a key of ``GPUS``.
        block: A key of ``BLOCKS``.
        recipe: Name of a ready recipe.
    """
    gpu = GPUS[arch]
    torch._dynamo.reset()
    with FakeTensorMode():
        graphs = gpu_graphs(*BLOCKS[block](recipe), gpu)
        schedules = [schedule(graph, gpu) for graph in graphs]
    torch._dynamo.reset()
    kernels: list[KernelResources] = []
    large: list[CompiledKernel] = []
    for found in schedules:
        bytes_moved = {each.name: each.bytes_read + each.bytes_written for each in found.launches}
        for kernel, compiled in _that_fit(found, gpu):
            kernels.append(kernel)
            large += [compiled] if bytes_moved.get(compiled.name, 0) >= LARGE else []
    generated = tuple(each for each in kernels if each.name.startswith("triton_"))
    ours = tuple(each for each in kernels if each not in generated)
    return Resources(gpu, generated, ours, _slowest(large, arch))


def _rows() -> dict[tuple[str, ...], list[str]]:
    """The rows of the page as it is: GPU, block and recipe, then the other cells."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {tuple(row[:3]): row[3:] for row in cells if row[0] in GPUS}


def _write(rows: dict[tuple[str, ...], list[str]]) -> None:
    order = [(arch, block, recipe) for arch in RECIPES for block in BLOCKS for recipe in RECIPES[arch][block]]
    shown = [COLUMNS, ("---",) * len(COLUMNS), *((*key, *rows[key]) for key in order if key in rows)]
    version = f"PyTorch {torch.__version__.partition('+')[0]}, Triton {__import__('triton').__version__}:"
    PAGE.write_text("\n".join([HEAD, version, "", *(f"| {' | '.join(row)} |" for row in shown)]) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Make the rows that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    arguments = parser.parse_args(argv)
    rows, unfit = _rows(), []
    for arch in arguments.gpus:
        for block in arguments.blocks:
            for recipe in RECIPES[arch][block]:
                found = resources_of(arch, block, recipe)
                rows[arch, block, recipe] = found.cells()
                unfit += [f"{arch}, {block}, {recipe}: {each}" for each in found.unfit]
                print(arch, block, recipe, *found.cells(), file=sys.stderr)
                _write(rows)  # each at once: all of them take minutes
    print(*unfit, sep="\n", file=sys.stderr)
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
