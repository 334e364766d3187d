"""How many bytes travel to the ranks of experts and back? Read from graphs, no rank is needed.

A layer of experts on a fake group, by `fp8compile.parallel.expert_routes`, rows spread evenly over the ranks. Bytes
are those that one rank sends in a step, its own part among them, as `fp8compile.testing.graph_report` says. They grow
with rows; only the width of the model moves the ratios.

    python -m benchmarks.expert_comm [--json] [--capacity] [--rows 512] [--dim 2048] [--hidden 32] [--ranks 8]
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.table import Row, emit
from fp8compile.parallel import expert_routes
from fp8compile.testing import graph_report

__all__ = ["expert_comm_row"]

SIZES = {"rows": 512, "dim": 2048, "hidden": 32, "experts": 16, "ranks": 8}
RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad", "mxfp8")
MESSAGES = {"dispatch": ("dispatch", False), "combine": ("combine", False)} | {
    "gradient of y": ("dispatch", True),
    "gradient of rows": ("combine", True),
}


def _start(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def expert_comm_row(name: str, *, capacity: bool, rows: int, dim: int, hidden: int, experts: int, ranks: int) -> Row:
    """What one rank sends with a recipe, or in bf16; in the process that has the fake group."""
    recipe = None if name == "bf16" else f8.recipes.by_name(name)
    # with a capacity, exactly what comes where rows are spread evenly
    places, group = rows // ranks if capacity else None, torch.distributed.group.WORLD

    def layer(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        routes = expert_routes(counts, group=group, capacity=places)
        grouped = routes.dispatch(x, recipe=recipe)
        ones = torch.ones_like(grouped[:, :1])
        y = feed_forward(grouped, gate_up, down, ones, routes.offsets, recipe or f8.Recipe())
        return routes.combine(y, x.shape[0], recipe=recipe) * weights

    arguments = experts_arguments(rows, dim, hidden, experts // ranks)[:-1]
    counts = torch.full((experts,), rows // experts)
    sent = graph_report(layer, *arguments, counts).collectives
    row: Row = {"recipe": name, "messages": len(sent)}
    for what, (op, backward) in MESSAGES.items():
        found = [each.bytes for each in sent if each.op.startswith(f"fp8compile.{op}") and each.backward == backward]
        row[f"{what} kB"] = sum(found) / 1e3
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that travel to the ranks of experts and back.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--capacity", action="store_true", help="messages of one length")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
    # a process of its own: PyTorch keeps groups
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(args.ranks,)) as pool:
        rows = [
            pool.submit(expert_comm_row, name, capacity=args.capacity, **sizes).result() for name in ("bf16", *RECIPES)
        ]
    for row in rows:
        everything = [sum(each[f"{what} kB"] for what in MESSAGES) for each in (row, rows[0])]
        row["dispatch to bf16"] = row["dispatch kB"] / rows[0]["dispatch kB"]
        row["all to bf16"] = everything[0] / everything[1]
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    emit(f"Sent to experts and back by one rank: {shown}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
