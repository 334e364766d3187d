"""Does a layer over ranks keep and move as much memory as a plain one of the same local shapes?

One rank's part of Llama 3 8B's feed-forward block at an eighth of each size, 1024 tokens, traced for a GPU; nothing is
computed. Each placement stands beside the plain block that one rank would have without others:

    tensor parallel, functions   column_parallel_linear and row_parallel_linear   plain, half of the hidden width
    tensor parallel, DTensor     ColwiseParallel and RowwiseParallel              plain, half of the hidden width
    FSDP in the graph            graph_fsdp, weights cut by rows                  plain, the whole hidden width

Kept are the bytes that the forward saves for the backward, without the arguments of the graph; generated, those that
kernels and GEMMs read and write, each buffer once a kernel, without what collectives launch.

    python -m benchmarks.placements [--json] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import fp8compile as f8
from benchmarks.blocks import SHAPES
from benchmarks.mlp import Mlp
from benchmarks.table import Row, emit
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs, kept_bytes
from fp8compile.testing.gpu.schedule import schedule

__all__ = ["PLACEMENTS", "RECIPES", "WITHOUT", "measure", "placement_row", "two_ranks"]

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")
TOKENS, RANKS = 8192 // 8, 2
WIDTH, HIDDEN = SHAPES["llama3-8b"].d // 8, SHAPES["llama3-8b"].h // 8
Made = tuple[Callable, tuple[Tensor, ...]]


@contextmanager
def two_ranks():
    """A process group of which the other rank is not there: enough to trace."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        if torch.distributed.get_world_size() != RANKS:
            raise RuntimeError(f"placements: this process has a group of other than {RANKS} ranks already.")
        yield
        return
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _tokens() -> Tensor:
    return torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def _plain(recipe: f8.Recipe, hidden: int) -> Made:
    return f8.convert(Mlp(WIDTH, hidden), recipe, filter="*"), (_tokens(),)


def _functions(recipe: f8.Recipe) -> Made:
    group, hidden = torch.distributed.group.WORLD, HIDDEN // RANKS

    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            plain = Mlp(WIDTH, hidden)
            self.norm = plain.norm
            self.gate, self.up, self.down = (each.weight for each in (plain.gate, plain.up, plain.down))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            column = {"recipe": recipe, "group": group}
            gate = f8.parallel.column_parallel_linear(normed, self.gate, **column)
            up = f8.parallel.column_parallel_linear(normed, self.up, **column)
            return x + f8.parallel.row_parallel_linear(silu(gate) * up, self.down, **column)

    return Sharded(), (_tokens(),)


def _dtensors(recipe: f8.Recipe) -> Made:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import parallel

    model = f8.convert(Mlp(WIDTH, HIDDEN), recipe, filter="*")
    plan = {
        "gate": f8.parallel.ColwiseParallel(),
        "up": f8.parallel.ColwiseParallel(),
        "down": f8.parallel.RowwiseParallel(),
    }
    return parallel.parallelize_module(model, DeviceMesh("cpu", torch.arange(RANKS)), plan), (_tokens(),)


def _graph_fsdp(recipe: f8.Recipe) -> Made:
    from torch.distributed.device_mesh import DeviceMesh

    model = f8.convert(Mlp(WIDTH, HIDDEN), recipe, filter="*")
    return f8.parallel.graph_fsdp(model, DeviceMesh("cpu", torch.arange(RANKS))), (_tokens(),)


# each with the hidden width of the plain block that it stands beside
PLACEMENTS: dict[str, tuple[Callable[[f8.Recipe], Made], int]] = {
    "functions": (_functions, HIDDEN // RANKS),
    "DTensor": (_dtensors, HIDDEN // RANKS),
    "FSDP in the graph": (_graph_fsdp, HIDDEN),
}
WITHOUT = {("functions", "delayed")}  # functions have no place for a state


def measure(make: Callable[[], Made], arch: str) -> tuple[int, int]:
    """Bytes kept for the backward, and bytes that generated code and GEMMs read and write in both passes."""
    torch._dynamo.reset()
    model, args = make()
    gpu = gpu_called(arch)
    graphs = gpu_graphs(model, args, gpu)
    launches = [launch for graph in graphs for launch in schedule(graph, gpu).launches]
    moved = sum(each.bytes_read + each.bytes_written for each in launches if "_c10d_functional" not in each.name)
    return kept_bytes(graphs[0]), moved


def placement_row(placement: str, recipe: str) -> Row:
    """One placement beside the plain block of the same local shapes, in bytes."""
    make, hidden = PLACEMENTS[placement]
    arch = "b200" if recipe == "mxfp8" else "h200"
    chosen = f8.recipes.by_name(recipe)
    with two_ranks():
        kept, moved = measure(lambda: make(chosen), arch)
        plain_kept, plain_moved = measure(lambda: _plain(chosen, hidden), arch)
    return {
        "placement": placement,
        "recipe": recipe,
        "kept MB": kept / 1e6,
        "plain kept MB": plain_kept / 1e6,
        "generated GB": moved / 1e9,
        "plain generated GB": plain_moved / 1e9,
        "to plain": moved / plain_moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of layers over ranks, beside plain layers.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    args = parser.parse_args()
    pairs = [(placement, recipe) for placement in args.placements for recipe in args.recipes]
    with two_ranks():
        rows = [placement_row(*pair) for pair in pairs if pair not in WITHOUT]
    emit(f"one rank of {RANKS}: {TOKENS} tokens, width {WIDTH}, hidden {HIDDEN}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
