"""Does FP8 train as well as bf16? Level, spread and gap for each recipe, and for a planted fault.

    python -m benchmarks.train_criterion [recipe ...]

Runs the default preset of `examples/train`: bf16 on three seeds, then each recipe, then a recipe with a wrong scale.
See examples/train/criterion.py for what the words mean. Exit code 1 unless every recipe passes and the fault does not.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace

import torch

import fp8compile as f8
from examples.train.config import BF16, NUM_SPREAD_SEEDS, Arm, TrainConfig
from examples.train.criterion import CONTEXT, Baseline, Verdict, counting_level
from examples.train.data import Text, load_text
from examples.train.trainer import Diverged, Trainer, reproduce_bits

__all__ = ["baseline", "final_loss", "plant_wrong_scale"]

# Each is one operand of the first two GEMMs; grad_weight's cannot show, as criterion.py says.
PLANTED_ROLES = ("weight", "grad_output")


@dataclass(frozen=True, repr=False)
class WrongScale(f8.CurrentScaling):
    """A fault to plant: its scales are twice what they have to be, its codes are right."""

    def scale_of(self, multiplier: torch.Tensor) -> torch.Tensor:
        """Return the scale that would undo half of the multiplier."""
        return super().scale_of(multiplier) * 2


def plant_wrong_scale(recipe: f8.Recipe, role: str) -> f8.Recipe:
    """The recipe with a wrong scale in one operand, to see that the criterion sees it.

    Args:
        recipe: A right one, of :class:`fp8compile.CurrentScaling`.
        role: The operand, "weight" for one.

    Returns:
        The wrong recipe.
    """
    right = getattr(recipe, role)
    fields = {"format": right.format, "block": right.block, "scale": right.scale, "eps": right.eps}
    return replace(recipe, **{role: WrongScale(**fields)})


def final_loss(config: TrainConfig, text: Text, recipe: f8.Recipe | None, *, seed: int) -> float:
    """Train without a run folder, and return the loss at the end.

    Args:
        config: Sizes, steps and the rest.
        text: Where batches come from.
        recipe: Any recipe, also one without a name; None for bf16.
        seed: Of weights and batches.

    Returns:
        Held-out loss, nats per byte; NaN if a training loss stopped being finite.
    """
    arm = Arm(name=BF16 if recipe is None else "FP8", recipe="", seed=seed)
    reproduce_bits(threads=config.threads)
    trainer = Trainer(config, arm, text, recipe)
    try:
        while trainer.step < config.steps:
            trainer.gradients()
            trainer.update()
    except Diverged:
        return math.nan
    return trainer.evaluate()


def baseline(config: TrainConfig, text: Text, *, context: int = CONTEXT) -> Baseline:
    """Train bf16 on each seed.

    Args:
        config: As for :func:`final_loss`; its seed is the first.
        text: Where batches come from.
        context: Of the level; 1 for a model too small or too short trained for 2.

    Returns:
        Level and losses.
    """
    seeds = range(config.seed, config.seed + NUM_SPREAD_SEEDS)
    losses = tuple(final_loss(config, text, None, seed=seed) for seed in seeds)
    return Baseline(level=counting_level(text, context=context), bf16_losses=losses)


def main(names: list[str]) -> int:
    """Run the criterion and print a line for each training.

    Args:
        names: Recipes; all that there are if empty.

    Returns:
        The exit code.
    """
    config = TrainConfig()
    text = load_text(None, batch=config.batch, seq=config.seq)
    start = time.perf_counter()
    reference = baseline(config, text)
    print(f"{reference}  [{time.perf_counter() - start:.0f} s]", flush=True)
    names = names or list(f8.recipes.names())
    cases = [(name, f8.recipes.by_name(name), True) for name in names]
    for role in PLANTED_ROLES:
        wrong = plant_wrong_scale(f8.recipes.by_name(names[0]), role)
        cases.append((f"{names[0]}, wrong scale of {role}", wrong, False))
    as_expected = True
    for name, recipe, should_pass in cases:
        start = time.perf_counter()
        loss = final_loss(config, text, recipe, seed=config.seed)
        verdict = Verdict(name=name, loss=loss, baseline=reference)
        print(f"{verdict}  [{time.perf_counter() - start:.0f} s]", flush=True)
        as_expected &= verdict.passed == should_pass
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
