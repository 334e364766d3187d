"""How many MB does a block keep from its forward to its backward, for each recipe, beside its arguments?

mlp, attention   the blocks of `benchmarks.blocks` at Llama 3 8B's sizes, 8192 tokens
layer            one more decoder layer of both blocks, so with the inputs of both: two layers less one
experts          the feed-forward of `benchmarks.experts_bytes`: 65,536 rows, 16 experts

exact            same bits as where everything is kept
default          with `fp8compile.SavedAsCodes()`
all              with every kind of `fp8compile.SavedTensor` compressed

Counted in the graphs that Inductor would get for an H200 (mxfp8, nvfp4: B200); each storage counts once. The block's
own input and its parameters are arguments. Seconds a row, without Triton.

    python -m benchmarks.kept [--json] [--recipes rowwise ...] [--blocks mlp ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.experts import experts_arguments
from benchmarks.experts_bytes import CONTENDERS, SIZES
from benchmarks.kernels import arch_for
from benchmarks.table import Row, emit
from fp8compile.saved_tensors import partitioner
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs, kept_bytes

__all__ = ["BLOCKS", "SAVED", "block_and_arguments", "kept_mb", "kept_row"]

TOKENS = 8192
BLOCKS = ("mlp", "attention", "layer", "experts")
SAVED = {
    "exact": None,
    "default": f8.SavedAsCodes(),
    "all": f8.SavedAsCodes(filter=("norm", "activation", "checkpoint", "attention", "gemm", "other")),
}


def kept_mb(kind: str, recipe: str, saved: f8.SavedAsCodes | None = None) -> float:
    """MB (10**6 bytes) that a block keeps for its backward.

    Args:
        kind: One of ``BLOCKS``.
        recipe: Name of a recipe, or "bf16".
        saved: What becomes codes; None for nothing.
    """
    if kind == "layer":
        return _kept_mb("layer 2", recipe, saved) - _kept_mb("layer 1", recipe, saved)
    return _kept_mb(kind, recipe, saved)


def _kept_mb(kind: str, recipe: str, saved: f8.SavedAsCodes | None) -> float:
    torch._dynamo.reset()
    cut = torch._inductor.config.patch(custom_partitioner_fn=saved and partitioner(saved))
    with FakeTensorMode(allow_non_fake_inputs=True), cut:
        call, args = block_and_arguments(kind, recipe)
        forward = gpu_graphs(call, args, gpu_called(arch_for(recipe)))[0]
    return kept_bytes(forward) / 1e6


def block_and_arguments(kind: str, recipe: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A block and what it is called with: "mlp", "attention", "experts", or "layer" and a number of layers."""
    if kind == "experts":
        return CONTENDERS[recipe](), experts_arguments(*SIZES.values())
    call, x = _layers(recipe, int(kind[-1])) if kind.startswith("layer") else _block(kind, recipe)
    return call, (x,)


def _block(kind: str, recipe: str) -> tuple[nn.Module, Tensor]:
    return block(kind, recipe, TOKENS, SHAPES["llama3-8b"])


def _layers(recipe: str, count: int) -> tuple[nn.Module, Tensor]:
    blocks = [_block(kind, recipe) for _ in range(count) for kind in ("attention", "mlp")]
    return nn.Sequential(*(model for model, _ in blocks)), blocks[0][1]


def kept_row(kind: str, recipe: str) -> Row:
    """MB kept by a block with one recipe."""
    row: Row = {"block": kind, "recipe": recipe}
    return row | {f"{name} MB": kept_mb(kind, recipe, saved) for name, saved in SAVED.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="MB that blocks keep for the backward.")
    parser.add_argument("--json", action="store_true")
    choices = ["bf16", *f8.recipes.names()]
    parser.add_argument("--recipes", nargs="+", choices=choices, default=choices)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=BLOCKS)
    args = parser.parse_args()
    asked = [(kind, recipe) for kind in args.blocks for recipe in args.recipes]
    rows = [kept_row(kind, recipe) for kind, recipe in asked if kind != "experts" or recipe in CONTENDERS]
    emit("Kept for the backward: Llama 3 8B, 8192 tokens; experts of 65,536 rows", rows, as_json=args.json)


if __name__ == "__main__":
    main()
