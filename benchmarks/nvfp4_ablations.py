"""What does each part of the four-bit recipe do for the loss?

    python -m benchmarks.nvfp4_ablations [--json] [--steps 200 --layers 2 --seeds 3] [--out DIR] [--only NAME ...]

The byte model of `benchmarks.loss_curves`, compiled, on one thread: NVFP4 as `fp8compile.recipes.nvfp4()` gives it,
with one part left out, with NVIDIA's additions for large models (the last blocks in MXFP8; a forward in high precision
at the end), and other recipes. Trainings of one seed have the same initial weights and batches, so a row is told from
another by the differences of its pairs: their mean, and the standard error of that mean. A CPU multiplies the codes
exactly, so the losses are those of the numerics. Each training that ended is kept below --out, and not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fp8compile as f8
from benchmarks.table import Row, emit
from examples.train.config import BF16, Arm, TrainConfig
from examples.train.data import Text, load_text
from examples.train.trainer import Trainer, reproduce_bits

REFERENCE = "nvfp4"
FINISH = 0.8  # share of the steps after which the forward leaves four bits


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training: what the model is converted by, and whether its forward leaves four bits at the end."""

    recipe: Callable[[], f8.Recipe] | None = f8.recipes.nvfp4
    options: dict[str, Any] = field(default_factory=dict)
    finish: bool = False


VARIANTS = {
    BF16: Variant(recipe=None),
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


def held_out(variant: Variant, config: TrainConfig, text: Text) -> float:
    """The loss at the end of a training, in nats a byte."""
    trainer = Trainer(config, Arm(name=BF16, recipe=BF16, seed=config.seed), text, None)
    if variant.recipe is not None:
        f8.convert(trainer.model, variant.recipe(), filter="!head", **variant.options)
    for step in range(config.steps):
        if variant.finish and step == int(FINISH * config.steps):
            f8.set_recipe(trainer.model, forward=None)
        trainer.gradients()
        trainer.update()
    return trainer.evaluate()


def kept(name: str, config: TrainConfig, text: Text, out: Path) -> float:
    """The loss at the end of a training, done here unless an earlier run of this script has ended it."""
    path = out / f"{name.replace(' ', '-')}-{config.seed}-{config.layers}-layers-{config.steps}-steps.json"
    if not path.exists():
        loss = held_out(VARIANTS[name], config, text)
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(loss))
        print(f"{name}, seed {config.seed}: {loss:.4f}", file=sys.stderr, flush=True)  # a training takes minutes
    return json.loads(path.read_text())


def paired(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """The mean of the differences, seed by seed, and its standard error, which one pair does not have."""
    differences = [loss - other for loss, other in zip(losses, others, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return statistics.fmean(differences), error


def table(losses: dict[str, list[float]]) -> list[Row]:
    """A row a variant: the mean over its seeds, and its distances from bf16 and from the whole recipe."""
    rows = []
    for name, of_seeds in losses.items():
        row: Row = {"training": name, "held out": statistics.fmean(of_seeds)}
        for other in (BF16, REFERENCE):
            row[f"minus {other}"], row[f"+- ({other})"] = paired(of_seeds, losses[other])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of the four-bit recipe, by their losses.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each, whose pairs are compared")
    parser.add_argument("--out", type=Path, default=Path("runs/nvfp4-ablations"), help="folder of ended trainings")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    names = [name for name in VARIANTS if name in (BF16, REFERENCE, *args.only)]
    configs = [
        TrainConfig(recipe=BF16, layers=args.layers, steps=args.steps, seed=seed, threads=1, device="cpu")
        for seed in range(args.seeds)
    ]
    text = load_text(None, batch=configs[0].batch, seq=configs[0].seq)
    losses: dict[str, list[float]] = {name: [] for name in names}
    reproduce_bits(threads=1)
    for config in configs:  # all of a seed before the next: what an hour cut short has done can be compared
        for name in names:
            losses[name].append(kept(name, config, text, args.out))
    size = configs[0].batch * configs[0].seq
    title = (
        f"Losses in nats a byte after {args.steps} steps of {size:,} bytes, {args.layers} layers of width "
        f"{configs[0].dim}; means over {args.seeds} seeds, differences of pairs with their standard errors"
    )
    emit(title, table(losses), as_json=args.json, digits=4)


if __name__ == "__main__":
    main()
