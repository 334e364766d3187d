"""What does each part of the four-bit recipe do for the loss?

    python -m benchmarks.nvfp4_ablations [--json] [--steps 160 --dim 64 --layers 2 --seeds 3] [--only NAME ...]

The byte model of `fp8compile train`, uncompiled, on the same data and from the same initial weights: NVFP4 as
`fp8compile.recipes.nvfp4()` gives it, with one part left out, with NVIDIA's additions for large models (the last
blocks in MXFP8; a forward in high precision at the end), and other recipes. A CPU multiplies the codes exactly, so
the losses are those of the numerics. The spread of bf16 over its seeds says which differences mean something.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import fp8compile as f8
from benchmarks.table import Row, emit
from fp8compile.cli.train.config import BF16, Arm, TrainConfig
from fp8compile.cli.train.text import Text, load_text
from fp8compile.cli.train.trainer import Trainer, reproducible
from fp8compile.cli.train.training import resolved

NUM_SMOOTHED = 50  # train losses in a mean: one batch alone is noise
FINISH = 0.8  # share of the steps after which the forward leaves four bits


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training: what the model is converted by, and whether its forward leaves four bits at the end."""

    recipe: Callable[[], f8.Recipe] | None = f8.recipes.nvfp4
    options: dict[str, Any] = field(default_factory=dict)
    finish: bool = False


VARIANTS = {
    "nvfp4": Variant(),
    "no transform": Variant(recipe=lambda: f8.recipes.nvfp4(hadamard=())),
    "no stochastic rounding": Variant(recipe=lambda: f8.recipes.nvfp4(grad_rounding="nearest")),
    "weights 1 x 16": Variant(recipe=lambda: f8.recipes.nvfp4(weight_block=(1, 16))),
    "mxfp8": Variant(recipe=f8.recipes.mxfp8),
    "tail in mxfp8": Variant(options={"tail": 0.15, "tail_recipe": f8.recipes.mxfp8()}),
    "finish in high precision": Variant(finish=True),
    "none of the three": Variant(
        recipe=lambda: f8.recipes.nvfp4(hadamard=(), grad_rounding="nearest", weight_block=(1, 16))
    ),
    "backward in bf16": Variant(recipe=lambda: f8.recipes.nvfp4(backward="bf16")),
}


def trained(variant: Variant, config: TrainConfig, text: Text, name: str) -> Row:
    """The losses at the end of a training."""
    arm = Arm(name=name, recipe=BF16, seed=config.seed)
    trainer = Trainer(config, arm, text, None)
    if variant.recipe is not None:
        f8.convert(trainer.model, variant.recipe(), filter="!head", **variant.options)
    losses = []
    for step in range(config.steps):
        if variant.finish and step == int(FINISH * config.steps):
            f8.set_recipe(trainer.model, forward=None)
        losses.append(trainer.gradients()["loss"])
        trainer.update()
    row = {
        "training": name,
        "held out": trainer.evaluate()["loss"],
        f"train, mean of {NUM_SMOOTHED}": statistics.fmean(losses[-NUM_SMOOTHED:]),
    }
    print(row, file=sys.stderr, flush=True)  # a training takes minutes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of the four-bit recipe, by their losses.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of bf16, whose distance is the yardstick")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    sizes = {"dim": args.dim, "hidden": 3 * args.dim, "layers": args.layers, "heads": 2, "kv_heads": 1}
    batches = {"batch": 8, "seq": 64, "steps": args.steps, "eval_sequences": 128}
    config = resolved(TrainConfig(recipe=BF16, compile=False, threads=1, device="cpu", **sizes, **batches))
    text = load_text(None, batch=config.batch, seq=config.seq)
    with reproducible(threads=config.threads):
        plain = Variant(recipe=None)
        rows = [
            trained(plain, replace(config, seed=seed), text, f"bf16, seed {seed}" if seed else BF16)
            for seed in range(args.seeds)
        ]
        rows += [trained(VARIANTS[name], config, text, name) for name in args.only]
    held_out = [row["held out"] for row in rows[: args.seeds]]
    for row in rows:
        row["minus bf16"] = row["held out"] - held_out[0]
    title = (
        f"Losses in nats a byte after {args.steps} steps of {config.batch * config.seq} bytes, {args.layers} layers "
        f"of width {args.dim}; bf16 over {args.seeds} seeds: spread {max(held_out) - min(held_out):.4f}"
    )
    emit(title, rows, as_json=args.json, digits=4)


if __name__ == "__main__":
    main()
