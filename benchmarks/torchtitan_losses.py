"""torchtitan's debug models, trained by its own Trainer in FP8 beside bf16, on a CPU over gloo.

Each is cut down to two layers, sequences of 64 and a global batch of 4 (see tests/torchtitan_on_cpu.py); blocks are
compiled. A row is one model on one layout of ranks; the losses of bf16 and of FP8 stand one above the other.

    python -m benchmarks.torchtitan_losses [--json] [--models llama3] [--cases fsdp2 tp2] [--backend inductor]
        [--recipe rowwise] [--spmd-backend partial_dtensor] [--steps 10]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

import fp8compile as f8
from benchmarks.table import Row, emit

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from torchtitan_on_cpu import CASES, MODELS, debug_config, import_torchtitan, losses_of, train

__all__ = ["losses"]


def losses(model: str, case: str, recipe: str, args: argparse.Namespace) -> list[float]:
    """The losses of a training on this rank."""
    torch._dynamo.reset()
    backend = None if args.backend == "none" else args.backend
    with tempfile.TemporaryDirectory() as folder:
        config = debug_config(
            model, CASES[case], folder, steps=args.steps, backend=backend, spmd_backend=args.spmd_backend
        )
        if recipe != "bf16":
            from fp8compile.integrations import torchtitan as f8titan

            config = f8titan.convert(config, f8.recipes.by_name(recipe), fsdp_float8_all_gather=args.gather)
        return losses_of(train(config))


def _serve(rank: int, world_size: int, port: int, cases: list[str], args: argparse.Namespace, found: list) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    import_torchtitan()
    for case, model, recipe in product(cases, args.models, ("bf16", args.recipe)):
        each = losses(model, case, recipe, args)
        if rank == 0:
            print(f"{CASES[case]}, {model}, {recipe}: {each}", file=sys.stderr, flush=True)
            found.append((case, model, recipe, each))
    dist.destroy_process_group()


def rows_of(world_size: int, args: argparse.Namespace) -> list[Row]:
    """Train all models in all cases that take so many ranks."""
    cases = [case for case in args.cases if CASES[case].world_size == world_size]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with multiprocessing.get_context("spawn").Manager() as manager:
        found = manager.list()
        multiprocessing.spawn(_serve, (world_size, store.port, cases, args, found), nprocs=world_size)
        return [
            {"ranks": str(CASES[case]), "model": model, "in": recipe}
            | {str(step): loss for step, loss in enumerate(each, 1)}
            for case, model, recipe, each in found
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="torchtitan's debug models in FP8 beside bf16.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backend", default="inductor", help="of torch.compile; none for eager mode")
    parser.add_argument("--recipe", choices=f8.recipes.names(), default="rowwise")
    parser.add_argument("--gather", action="store_true", help="FSDP2 gathers weights as codes")
    parser.add_argument("--spmd-backend", default="partial_dtensor")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    rows = [row for size in sorted({CASES[case].world_size for case in args.cases}) for row in rows_of(size, args)]
    title = f"torchtitan {version('torchtitan')}, {args.spmd_backend}, {args.backend}"
    emit(title, rows, as_json=args.json)


if __name__ == "__main__":
    main()
