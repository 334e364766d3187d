"""What does a micro-batch move if the codes of weights live for a step (`weight_lifetime="step"`), and what the step?

The feed-forward block of a Llama 3 8B, 8192 tokens: GB that generated code reads and writes in forward and backward,
without and with codes that are there, and GB that making the codes again moves, once a step. For an H200 (mxfp8 and
nvfp4: B200). ``--page`` writes docs/results/cached-weights.md.

    python -m benchmarks.cached_weights [--json] [--recipes rowwise ...] [--page]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES
from benchmarks.kept import TOKENS
from benchmarks.kernels import arch_for
from benchmarks.mlp import Mlp
from benchmarks.table import Row, emit
from fp8compile.ops import weight_codes as make_codes
from fp8compile.ops.layer.operands import WEIGHT_ROLES
from fp8compile.testing import gpu_kernels

__all__ = ["RECIPES", "moved_row"]

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "nvfp4")
PAGE = Path(__file__).parents[1] / "docs" / "results" / "cached-weights.md"
MICRO_BATCHES = 8


def _gb(call: Any, args: tuple[Tensor, ...], name: str) -> tuple[float, ...]:
    torch._dynamo.reset()
    return tuple(code.bytes / 1e9 for code in gpu_kernels(call, *args, arch=arch_for(name)))


def moved_row(name: str) -> Row:
    """GB moved by a micro-batch without and with codes that are there, and by making them, once a step."""
    recipe, shape = f8.recipes.by_name(name), SHAPES["llama3-8b"]
    found: dict[bool, tuple[float, ...]] = {}
    with FakeTensorMode():
        x = torch.randn(TOKENS, shape.d, dtype=torch.bfloat16, requires_grad=True)
        for cached in (False, True):
            own = replace(recipe, weight_lifetime="step") if cached else recipe
            model = f8.convert(Mlp(shape.d, shape.h), own, filter="*")
            weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
            found[cached] = _gb(model, (x,), name)

        def step(*weights: Tensor) -> list[tuple[Tensor, ...]]:
            roles = WEIGHT_ROLES[:1] if recipe.shares_weight_codes() else WEIGHT_ROLES
            return [make_codes(weight, role, recipe) for weight in weights for role in roles]

        making = sum(_gb(step, tuple(weight.detach() for weight in weights), name))
    without, cached_gb = sum(found[False]), sum(found[True])
    a_micro_batch = cached_gb + making / MICRO_BATCHES
    return {
        "recipe": name,
        "GB": without,
        "cached GB": cached_gb,
        "a step GB": making,
        f"ratio of {MICRO_BATCHES}": a_micro_batch / without,
    }


def page(rows: list[Row]) -> str:
    """The page of docs/results."""
    body = [
        f"| {row['recipe']} | {row['GB']:.3f} | {row['cached GB']:.3f} | {row['a step GB']:.3f} "
        f"| {row[f'ratio of {MICRO_BATCHES}']:.3f} |"
        for row in rows
    ]
    return "\n".join(
        [
            "# Cached weights",
            "",
            'What [`weight_lifetime="step"`](../memory.md#cache-fp8-weights-across-micro-batches) saves, counted',
            "in the code that Inductor generates for an H200 (mxfp8, nvfp4: B200). **No GPU has run it.**",
            "`python -m benchmarks.cached_weights --page` writes this page.",
            "",
            "GB read and written by the feed-forward block of a Llama 3 8B, 8192 tokens: forward and backward",
            "of a micro-batch that quantizes its weights, of one that finds them cached, and what quantization",
            f"moves once per step; then a micro-batch of a step of {MICRO_BATCHES} compared with one without cache.",
            "",
            f"| recipe | a micro-batch | cached | once per step | ratio, {MICRO_BATCHES} micro-batches |",
            "|---|---|---|---|---|",
            *body,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes moved with weights whose codes live for a step.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    rows = [moved_row(name) for name in args.recipes]
    if args.page:
        _, head, others = PAGE.read_text().partition("\n## ")  # sections that other scripts write
        PAGE.write_text(page(rows) + head + others)
    emit("GB moved: a feed-forward of Llama 3 8B, 8192 tokens", rows, as_json=args.json, digits=3)


if __name__ == "__main__":
    main()
