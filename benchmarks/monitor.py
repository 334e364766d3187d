"""What statistics add to the bytes of generated code, forward and backward.

    mlp        the MLP block of Llama 3 8B, 8192 tokens
    experts    the feed-forward of 16 experts of Qwen3-30B-A3B, 65536 rows (`benchmarks.experts_bytes`)

Bytes are Inductor's count for generated code, each buffer once a kernel, with what opaque ops launch inside. "off" is
a step that is not read, "on" one that is. The mean is that of a run that reads every n-th step.

    python -m benchmarks.monitor [--json] [--block experts] [--recipes tensorwise ...] [--statistics amax ...]
                                 [--operands input ...]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.experts import Experts, experts_arguments
from benchmarks.experts_bytes import SIZES, recipe_of_experts
from benchmarks.kernels import arch_for
from benchmarks.table import Row, emit
from fp8compile.testing import gpu_kernels

__all__ = ["monitor_row"]

TOKENS = 8192
RECIPES = {
    "mlp": ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"),
    "experts": ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"),
}
EVERY = (10, 100)


def _made(kind: str, recipe: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block, and its arguments."""
    if kind == "mlp":
        model, x = block("mlp", recipe, TOKENS, SHAPES["llama3-8b"])
        return model, (x,)
    x, gate_up, down, *others = experts_arguments(*SIZES.values())
    return Experts(gate_up, down, recipe_of_experts(recipe)), (x, *others)


def _generated(
    kind: str, recipe: str, statistics: tuple[str, ...], operands: tuple[str, ...] | None
) -> tuple[float, int]:
    """Bytes in GB, and the number of generated kernels."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, arguments = _made(kind, recipe)
        if statistics:
            f8.Monitor(model, statistics, operands=operands)
        codes = gpu_kernels(model, *arguments, arch=arch_for(recipe))
    return sum(code.bytes for code in codes) / 1e9, sum(len(code.kernels) for code in codes)


def monitor_row(
    recipe: str, statistics: tuple[str, ...], operands: tuple[str, ...] | None = None, kind: str = "mlp"
) -> Row:
    """A row of the table, for a block of this kind."""
    (off, kernels_off), (on, kernels_on) = (_generated(kind, recipe, each, operands) for each in ((), statistics))
    means = {f"every {n}": round((on + (n - 1) * off) / (n * off), 4) for n in EVERY}
    kernels = {"kernels off": kernels_off, "kernels on": kernels_on}
    return (
        {"recipe": recipe, "off GB": round(off, 3), "on GB": round(on, 3), "ratio": round(on / off, 4)}
        | means
        | kernels
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--block", choices=RECIPES, default="mlp")
    parser.add_argument("--recipes", nargs="+")
    parser.add_argument("--statistics", nargs="+", default=("amax", "saturation", "underflow"))
    parser.add_argument("--operands", nargs="+")
    args = parser.parse_args()
    operands = tuple(args.operands) if args.operands else None
    emit(
        f"bytes of generated code, {args.block}",
        [
            monitor_row(recipe, tuple(args.statistics), operands, args.block)
            for recipe in args.recipes or RECIPES[args.block]
        ],
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
