"""Time of a step on an H200 by a model, kernel by kernel, without the GPU: memory traffic, instructions, FLOPs.

    python -m benchmarks.gpu_model [--blocks experts ep8 layer] [--recipes bf16 rowwise ...] [--only-sums]

A block is compiled for the GPU, forward and backward, and each launch takes

    PyTorch's GEMM    its FLOPs at the rate in ``RATES``, or the time of its bytes if that is longer
    our grouped GEMM  cycles of tensor cores plus those of the loop's other instructions, or of L2 if these are more
    another kernel    its bytes at 3.4 TB/s; if its issue ratio is above 0.5, that time twice the ratio

for a multiprocessor issues at most 4 warp instructions a cycle, and about 2 in practice (the ratio assumes 4; see
`fp8compile.testing.explain.issue_cycles`). Kernels of libraries other than GEMMs take the time of their bytes. The
rates are those that explain the one run on an H200 (docs/results/h200.md); times of this model are estimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.gpu_resources import BLOCKS as DENSE
from benchmarks.mlp import Mlp
from benchmarks.table import Row, lines
from fp8compile.testing.explain.issue_cycles import CLOCKS, IssueCycles, issue_cycles
from fp8compile.testing.explain.roofline import PEAKS
from fp8compile.testing.gpu.compiled import compiled_kernels
from fp8compile.testing.gpu.cubin import KernelResources, assembled
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch, schedule, taken_from
from fp8compile.testing.graphs.recording import node_value, op_name

__all__ = ["RATES", "Launched", "launches_of", "main"]

GPU = "h200"
BANDWIDTH = 3.4e12  # bytes per second of a copy
RATES = {  # FLOPs per second of PyTorch's GEMMs
    "bf16 dense": 690e12, "bf16 grouped": 590e12, "fp8 dense": 1200e12, "fp8 grouped": 850e12,
}  # fmt: skip
TILE = 128  # columns and summed elements of a step of our grouped GEMM
TENSOR_CYCLES = 512  # for FP8 128 x 128 x 128 on a multiprocessor
AROUND_LOOP = 4800  # cycles of a program of our grouped GEMM before and after its loop
L2_BYTES = 39  # per cycle and multiprocessor
SHAPES = {  # rows, dim, hidden, experts
    "experts": (65536, 2048, 768, 128), "ep8": (65536, 2048, 768, 16), "mixtral": (32768, 4096, 14336, 8),
    "deepseek": (65536, 7168, 2048, 8),
}  # fmt: skip
RECIPES = ("bf16", "rowwise", "blockwise", "rowwise_bf16_wgrad", "blockwise_bf16_wgrad")


@dataclass(frozen=True)
class Launched:
    """A launch of a step, by the model.

    Attributes:
        name: Name of the kernel or of the operator.
        megabytes: MB that it reads and writes.
        flops: Floating-point operations of a GEMM; 0 for other kernels.
        seconds: Time by the model.
        least_seconds: Time by the bandwidth of a copy and, for a GEMM, the published peak rate.
        issue: Issue cycles and instructions; None for a library's kernel.
        resources: Registers and shared memory; None for a library's kernel.
    """

    name: str
    megabytes: float
    flops: float
    seconds: float
    least_seconds: float
    issue: IssueCycles | None
    resources: KernelResources | None

    def row(self) -> Row:
        """The row of the table; the last column is the share of the roofline."""
        programs = warps = ratio = registers = "-"
        if self.resources is not None and self.issue is not None:
            ratio = f"{self.issue.ratio:.2f}" if self.issue.bytes_moved and not self.flops else "-"
            registers, warps = str(self.resources.registers), str(self.resources.num_warps)
            programs = str(_programs(self.resources))
        return {
            "kernel": self.name, "MB": round(self.megabytes), "GFLOP": round(self.flops / 1e9), "issue": ratio,
            "registers": registers, "warps": warps, "programs": programs, "ms": self.seconds * 1e3,
            "of roofline": self.least_seconds / self.seconds,
        }  # fmt: skip


def _programs(kernel: KernelResources) -> int:
    """How many programs of a kernel run at a time on a multiprocessor; registers are given to a warp by 256."""
    gpu = GPUS[GPU]
    registers = -(-kernel.registers * gpu.warp_size // 256) * 256 * kernel.num_warps
    shared = gpu.shared_memory_per_block_optin // max(kernel.shared_bytes, 1)
    return min(gpu.regs_per_multiprocessor // registers, 64 // kernel.num_warps, shared, 32)


def _block(name: str, recipe: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if name != "layer":
        chosen = None if recipe == "bf16" else f8.recipes.by_name(recipe)
        return partial(feed_forward, recipe=chosen), experts_arguments(*SHAPES[name])
    if recipe != "bf16":
        return DENSE["feed-forward"](recipe)
    return Mlp(4096, 14336), (torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True),)


@dataclass(frozen=True)
class _Product:
    """A GEMM, and for a grouped one the shape (m, n, k) of a group's product; parts of tiles count whole."""

    flops: float
    is_fp8: bool
    is_grouped: bool
    groups: int
    of_group: tuple[float, float, float]

    def tiles(self, rows: int) -> float:
        m, n, _ = self.of_group
        return self.groups * (m / rows + (0.5 if m % rows else 0.0)) * n / TILE

    def seconds(self) -> float:
        return self.flops / RATES[f"{'fp8' if self.is_fp8 else 'bf16'} {'grouped' if self.is_grouped else 'dense'}"]


def _product(found: Schedule, launch: ScheduledLaunch) -> _Product | None:
    """Return the GEMM that a launch computes; None if it computes none."""
    for node in filter(None, map(found.holder, launch.made)):
        node, _ = taken_from(node)
        packet = getattr(node.target, "overloadpacket", None)
        if packet in flop_registry:
            values = torch.fx.map_arg(node.args, node_value)
            a, b = [each for each in values if isinstance(each, torch.Tensor)][:2]
            y = node_value(node)
            flops = flop_registry[packet](*values, out_val=y)
            is_grouped = "grouped" in op_name(node.target)
            if is_grouped and b.ndim == 3:  # groups differ in size, so most end within a tile
                groups, of_group = b.shape[0], (a.shape[0] / b.shape[0] + 0.1, y.shape[-1], a.shape[1])
            else:
                groups = y.shape[0] if is_grouped else 1
                of_group = (y.shape[-2], y.shape[-1], a.shape[1] / groups)
            return _Product(flops, a.itemsize == 1, is_grouped, groups, of_group)
    return None


def _own_gemm_seconds(product: _Product, resources: KernelResources, issue: IssueCycles) -> float:
    """Time of our grouped GEMM, whose tensor cores wait while a program issues other instructions of the loop."""
    rows, trips = resources.config["ROWS"], product.of_group[2] / TILE
    tensor_cores, others = TENSOR_CYCLES * rows / TILE, issue.instructions * resources.num_warps / 4
    of_tile = ((tensor_cores + others) * trips + AROUND_LOOP) / _programs(resources)
    of_tile = max(of_tile, tensor_cores * trips, (rows + TILE) * TILE / L2_BYTES * trips)
    return product.tiles(rows) * of_tile / GPUS[GPU].multi_processor_count / (CLOCKS[GPU][0] * 1e9)


def _kernels(found: Schedule) -> dict[str, list[tuple[KernelResources, IssueCycles]]]:
    """Map names of generated kernels to their configurations; those that spill only if all do."""
    kernels: dict[str, list[tuple[KernelResources, IssueCycles]]] = {}
    for each in compiled_kernels(found.source, GPUS[GPU]):
        kernels.setdefault(each.name, []).append((assembled(each, GPUS[GPU]), issue_cycles(each, GPU)))
    return {name: [each for each in own if not each[0].spilled_bytes] or own for name, own in kernels.items()}


def _seconds(
    product: _Product | None, moved: int, resources: KernelResources | None, issue: IssueCycles | None
) -> float:
    of_bytes = moved / BANDWIDTH
    if product is None:
        return of_bytes * max(1.0, 2 * issue.ratio if issue else 0.0)
    if resources is None or issue is None:
        return max(of_bytes, product.seconds())
    return max(of_bytes, _own_gemm_seconds(product, resources, issue))


def launches_of(block: str, recipe: str) -> Iterator[Launched]:
    """Compile a block for the GPU, forward and backward, and yield its launches in order.

    Args:
        block: A key of ``SHAPES``, or "layer": the feed-forward of Llama 3 8B with 8192 tokens.
        recipe: Name of a ready recipe, or "bf16".
    """
    gpu = GPUS[GPU]
    torch._dynamo.reset()
    with FakeTensorMode():
        schedules = [schedule(graph, gpu) for graph in gpu_graphs(*_block(block, recipe), gpu)]
    torch._dynamo.reset()
    for found in schedules:
        kernels = _kernels(found)
        for launch in found.launches:
            product = _product(found, launch)
            moved = launch.bytes_read + launch.bytes_written
            candidates = kernels.get(launch.name, [(None, None)])
            times = [_seconds(product, moved, *candidate) for candidate in candidates]
            seconds, (resources, issue) = min(zip(times, candidates, strict=True), key=itemgetter(0))
            peak = PEAKS[GPU].fp8 if product and product.is_fp8 else PEAKS[GPU].bf16
            flops = product.flops if product else 0.0
            yield Launched(
                name=launch.name.removesuffix(".default"),
                megabytes=moved / 1e6,
                flops=flops,
                seconds=seconds,
                least_seconds=max(flops / peak, moved / BANDWIDTH),
                issue=issue,
                resources=resources,
            )


def main() -> None:
    """Print a table for each block and recipe, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=("layer", *SHAPES), default=["experts", "ep8", "layer"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--only-sums", action="store_true", help="print no table of kernels")
    arguments = parser.parse_args()
    sums: list[Row] = []
    for block in arguments.blocks:
        for recipe in arguments.recipes:
            found = list(launches_of(block, recipe))
            if not arguments.only_sums:
                print(f"\n{block}, {recipe}", *lines([each.row() for each in found], digits=2), sep="\n", flush=True)
            ms = sum(each.seconds for each in found) * 1e3
            bf16 = next((row["ms"] for row in sums if row["block"] == block and row["recipe"] == "bf16"), float("nan"))
            sums.append(
                {
                    "block": block, "recipe": recipe, "launches": len(found),
                    "GB": sum(each.megabytes for each in found) / 1e3, "ms": ms,
                    "to bf16": (ms if recipe == "bf16" else bf16) / ms,
                }
            )  # fmt: skip
            print(*lines(sums[-1:], digits=2), sep="\n", flush=True)
    print("", *lines(sums, digits=2), sep="\n")


if __name__ == "__main__":
    main()
