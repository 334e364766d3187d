"""How many bytes does a step send under tensor and sequence parallelism? Read from graphs, no rank is needed.

The feed-forward block of Llama 3 8B on fake process groups, with fp8compile's styles and, in bf16, PyTorch's stock
ones. Bytes are those that one rank receives, forward and backward, as the graphs say.

    python -m benchmarks.comm [--json] [--m 8192] [--ranks 2 4 8] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn

import fp8compile as f8
from benchmarks.blocks import SHAPES
from benchmarks.mlp import Mlp
from benchmarks.table import Row, emit
from fp8compile.testing import graph_report

__all__ = ["comm_row"]

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")  # those that tensor parallelism takes


def _start() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def _parallel(recipe: str | None, ranks: int, d: int, h: int) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, parallel

    model = Mlp(d, h)
    if recipe is None:
        colwise = parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        rowwise = parallel.RowwiseParallel(output_layouts=Shard(0))
    else:
        model = f8.convert(model, f8.recipes.by_name(recipe))
        colwise = f8.parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        rowwise = f8.parallel.RowwiseParallel(output_layouts=Shard(0))
    norm = parallel.SequenceParallel(sequence_dim=0, use_local_output=False)
    plan = {"norm": norm, "gate": colwise, "up": colwise, "down": rowwise}
    return parallel.parallelize_module(model, DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("tensor",)), plan)


def comm_row(recipe: str | None, ranks: int, m: int, d: int, h: int) -> Row:
    """What one rank of so many receives; in the process that has the fake group."""
    torch._dynamo.reset()
    model = _parallel(recipe, ranks, d, h)
    x = torch.zeros(m // ranks, d, dtype=torch.bfloat16, requires_grad=True)
    report = graph_report(model, x, backend="aot_eager")
    sent = report.collectives
    return {
        "recipe": recipe or "bf16",
        "ranks": ranks,
        "collectives": len(sent),
        "MB": sum(collective.bytes for collective in sent) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes a step sends under tensor and sequence parallelism.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--m", type=int, default=256, help="tokens of all ranks")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    # a process of its own: PyTorch keeps meshes beyond their group
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as pool:
        rows = [
            pool.submit(comm_row, recipe, ranks, args.m, shape.d, shape.h).result()
            for ranks in args.ranks
            for recipe in (None, *args.recipes)
        ]
    for row in rows:
        bf16 = next(other["MB"] for other in rows if other["recipe"] == "bf16" and other["ranks"] == row["ranks"])
        row["to bf16"] = row["MB"] / bf16
    emit(f"Sent in a step, block of {args.shape}, M={args.m}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
