"""Runs of `examples/train` at tiny sizes: their words, their rows, and a trainer of one arm."""

from __future__ import annotations

import json
from typing import Any

from examples.train.config import TrainConfig, arms
from examples.train.data import load_text
from examples.train.trainer import Trainer, named_recipe

__all__ = ["TINY", "losses", "rows_of", "run_words", "small_trainer", "steps_of"]

TINY = {
    "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32, "seq": 16, "batch": 4,
    "steps": 6, "eval_every": 3, "eval_sequences": 6, "checkpoint_every": 2, "threads": 1,
}  # fmt: skip


def run_words(sizes, text_file, out, *more, **changes) -> list[str]:
    """The words of a run with these sizes, on a CPU."""
    found = {**sizes, **changes}
    flags = [word for name, value in found.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*map(str, (*flags, "--data", text_file, "--out", out, "--device", "cpu", *more))]


def rows_of(folder, *kinds) -> list[dict[str, Any]]:
    """The rows of a run, of some kinds or of all."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if not kinds or row["kind"] in kinds]


def losses(folder) -> list[tuple]:
    """The losses of a run, of training and held out."""
    return [(row["arm"], row["kind"], row["step"], row["loss"]) for row in rows_of(folder, "train", "eval")]


def small_trainer(text_file, *, recipe="rowwise", **changes) -> Trainer:
    """A trainer of the first arm of such a run."""
    config = TrainConfig(**{**TINY, "device": "cpu", "recipe": recipe, **changes})
    text = load_text(text_file, batch=config.batch, seq=config.seq)
    return Trainer(config, arms(config)[0], text, named_recipe(recipe))


def steps_of(trainer, count) -> list[float]:
    """Losses of some steps."""
    found = []
    for _ in range(count):
        found.append(trainer.gradients())
        trainer.update()
    return found
