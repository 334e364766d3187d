"""torchtitan's debug models, trained by its own Trainer in FP8 beside bf16, on a CPU over gloo.

Each is cut down to two layers, sequences of 64 and a global batch of 4 (tests/helpers/torchtitan_on_cpu.py); blocks
are compiled. A row is one model on one layout of ranks; the losses of bf16 and of FP8 stand one above the other.

    python -m benchmarks.torchtitan_losses [--json] [--models llama3] [--cases fsdp2 tp2] [--backend inductor]
        [--recipe rowwise] [--gather] [--spmd-backend partial_dtensor] [--without-checkpointing] [--typechecked]
        [--steps 10]
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from torchtitan_on_cpu import CASES, MODELS, debug_config, losses_of, train

__all__ = ["row_of"]


def _train(rank: int, world_size: int, port: int, case: str, model: str, recipe: str, args: dict, found: list) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with tempfile.TemporaryDirectory() as folder:
        config = debug_config(model, CASES[case], folder, **args["options"])
        if args["without_checkpointing"]:
            config.activation_checkpoint = None
        if recipe != "bf16":
            from fp8compile.integrations import torchtitan as f8titan

            config = f8titan.convert(config, f8.recipes.by_name(recipe), fsdp_float8_all_gather=args["gather"])
        found[:] = losses_of(train(config))
    dist.destroy_process_group()


def row_of(case: str, model: str, recipe: str, args: dict) -> Row:
    """Train a model on ranks of its own: torchtitan's spmd_types keeps the meshes of a process's first Trainer."""
    world_size = CASES[case].world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with multiprocessing.get_context("spawn").Manager() as manager:
        found = manager.list()
        arguments = (world_size, store.port, case, model, recipe, args, found)
        multiprocessing.spawn(_train, arguments, nprocs=world_size)
        losses = {str(step): loss for step, loss in enumerate(found, 1)}
    return {"ranks": str(CASES[case]), "model": model, "in": recipe, **losses}


def main() -> None:
    parser = argparse.ArgumentParser(description="torchtitan's debug models in FP8 beside bf16.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backend", default="inductor", help="of torch.compile; none for eager mode")
    parser.add_argument("--recipe", choices=f8.recipes.names(), default="rowwise")
    parser.add_argument("--gather", action="store_true", help="FSDP2 all-gathers weights in FP8")
    parser.add_argument("--spmd-backend", default="partial_dtensor")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--without-checkpointing", action="store_true", help="no activation checkpointing")
    parser.add_argument("--typechecked", action="store_true", help="by spmd_types, in eager mode")
    given = parser.parse_args()
    backend = None if given.backend == "none" else given.backend
    options = {"steps": given.steps, "backend": backend, "spmd_backend": given.spmd_backend}
    args = {
        "options": {**options, "typechecked": given.typechecked},
        "gather": given.gather,
        "without_checkpointing": given.without_checkpointing,
    }
    rows = [row_of(*each, args) for each in product(given.cases, given.models, ("bf16", given.recipe))]
    emit(f"torchtitan {version('torchtitan')}, {given.spmd_backend}, {given.backend}", rows, as_json=given.json)


if __name__ == "__main__":
    main()
