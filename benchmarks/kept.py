"""How many MB does a block keep from its forward to its backward, for each recipe, beside its arguments?

mlp, attention   the blocks of `benchmarks.blocks` at Llama 3 8B's sizes, 8192 tokens
experts          the feed-forward of `benchmarks.experts_bytes`: 65,536 rows, 16 experts

Counted in the graphs that Inductor would get for an H200 (mxfp8, nvfp4: B200); each storage counts once. The block's
own input and its parameters are arguments. Seconds a row, without Triton.

    python -m benchmarks.kept [--json] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.experts import experts_arguments
from benchmarks.experts_bytes import CONTENDERS, SIZES
from benchmarks.kernels import arch_for
from benchmarks.table import Row, emit
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs, kept_bytes

__all__ = ["kept_mb", "kept_row"]

TOKENS = 8192


def kept_mb(kind: str, recipe: str) -> float:
    """MB (10**6 bytes) that a block keeps for its backward.

    Args:
        kind: "mlp", "attention" or "experts".
        recipe: Name of a recipe, or "bf16".
    """
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if kind == "experts":
            call, args = CONTENDERS[recipe](), experts_arguments(*SIZES.values())
        else:
            call, x = block(kind, recipe, TOKENS, SHAPES["llama3-8b"])
            args = (x,)
        forward = gpu_graphs(call, args, gpu_called(arch_for(recipe)))[0]
    return kept_bytes(forward) / 1e6


def kept_row(recipe: str) -> Row:
    """MB kept by each block with one recipe; None for experts with a recipe that has none."""
    row: Row = {"recipe": recipe}
    for kind in ("mlp", "attention", "experts"):
        row[f"{kind} MB"] = kept_mb(kind, recipe) if kind != "experts" or recipe in CONTENDERS else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="MB that blocks keep for the backward.")
    parser.add_argument("--json", action="store_true")
    choices = ["bf16", *f8.recipes.names()]
    parser.add_argument("--recipes", nargs="+", choices=choices, default=choices)
    args = parser.parse_args()
    rows = [kept_row(recipe) for recipe in args.recipes]
    emit("Kept for the backward: Llama 3 8B, 8192 tokens; experts of 65,536 rows", rows, as_json=args.json)


if __name__ == "__main__":
    main()
