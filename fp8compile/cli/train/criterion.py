"""When an FP8 training counts as right: three numbers and two comparisons.

    level    what FP8 has to get below: the held-out loss of a table, counted on the same training
             text, of which byte follows which two. A model above it learnt less than counting does.
    spread   maximum minus minimum of the final held-out loss of bf16 over three seeds. A seed
             decides weights and batches, so this is how far two honest bf16 runs lie apart. Of
             three numbers the range is the whole of what is known; a standard deviation would
             suggest more, and is narrower.
    gap      |FP8 - bf16|, final held-out loss, same seed, hence same weights and batches. Both
             signs count: a wrong scale may lower a loss by accident.

    passes   FP8 loss < level  and  gap <= spread

A scale that is wrong by a factor in an operand of the output or of grad_input fails this by far. In
grad_weight alone it cannot: AdamW divides a constant factor of a gradient out again. That is for
the bitwise tests of the quantizers to see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import fp8compile as f8
from fp8compile.cli.errors import Failed
from fp8compile.cli.train.config import BF16, NUM_SPREAD_SEEDS, Arm
from fp8compile.cli.train.trainer import Trainer, reproducible

if TYPE_CHECKING:
    from fp8compile.cli.train.config import TrainConfig
    from fp8compile.cli.train.text import Text

__all__ = [
    "Baseline",
    "Verdict",
    "WrongScale",
    "baseline",
    "counting_level",
    "final_loss",
    "plant_wrong_scale",
]

NUM_VALUES = 256
CONTEXT = 2  # bytes that the level looks back on; the default preset gets well below that
# One made-up observation for each context, spread over all bytes: Lidstone's rule. On 10 MB of
# Python it costs less than 0.01 nats against the best such constant.
PSEUDO_COUNT = 1 / NUM_VALUES


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What FP8 is measured against.

    Attributes:
        level: Nats per byte that FP8 has to get below.
        bf16_losses: Final held-out losses of bf16, the first one of the seed that FP8 runs on.
    """

    level: float
    bf16_losses: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Maximum minus minimum over the seeds, nats per byte."""
        return max(self.bf16_losses) - min(self.bf16_losses)

    def __str__(self) -> str:
        """The numbers in one line."""
        losses = ", ".join(f"{loss:.4f}" for loss in self.bf16_losses)
        return (
            f"bf16 over {len(self.bf16_losses)} seeds {losses}: spread {self.spread:.4f}; "
            f"level by counting {self.level:.4f} nats/byte"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one FP8 training.

    Attributes:
        name: What was trained.
        loss: Its final held-out loss, nats per byte.
        baseline: What it is held against.
    """

    name: str
    loss: float
    baseline: Baseline

    @property
    def gap(self) -> float:
        """FP8 minus bf16 on the same seed, nats per byte."""
        return self.loss - self.baseline.bf16_losses[0]

    @property
    def passed(self) -> bool:
        """Whether the criterion holds; NaN never does."""
        return self.loss < self.baseline.level and abs(self.gap) <= self.baseline.spread

    def __str__(self) -> str:
        """The comparison in one line."""
        return (
            f"{'PASS' if self.passed else 'FAIL'} {self.name}: loss {self.loss:.4f} "
            f"(level {self.baseline.level:.4f}), gap to bf16 {self.gap:+.4f} "
            f"(spread {self.baseline.spread:.4f})"
        )


@dataclass(frozen=True, repr=False)
class WrongScale(f8.CurrentScaling):
    """A fault to plant: its scales are twice what they have to be, its codes are right."""

    def scale_of(self, multiplier: torch.Tensor) -> torch.Tensor:
        """Return the scale that would undo half of the multiplier."""
        return super().scale_of(multiplier) * 2


def plant_wrong_scale(recipe: f8.Recipe, slot: str) -> f8.Recipe:
    """Return the recipe with a wrong scale in one operand, to see that the check sees it.

    Args:
        recipe: A right one, of :class:`fp8compile.CurrentScaling`.
        slot: The operand, "weight" for one.

    Returns:
        The wrong recipe.
    """
    right = getattr(recipe, slot)
    fields = {"format": right.format, "block": right.block, "scale": right.scale, "eps": right.eps}
    return replace(recipe, **{slot: WrongScale(**fields)})


def _keys(bytes_P: torch.Tensor, *, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number each context and each context with the byte after it."""
    wide = bytes_P.long()
    places = len(wide) - context
    before = sum(wide[index : index + places] * NUM_VALUES ** (context - 1 - index) for index in range(context))
    return before, before * NUM_VALUES + wide[context:]


def counting_level(text: Text, *, context: int = CONTEXT) -> float:
    """Return the held-out loss of predicting a byte by those before it, by counting.

    Args:
        text: Counted on its training part, scored on its held-out tail.
        context: How many bytes before it, 1 or 2.

    Returns:
        Nats per byte.
    """
    train_contexts, train_followed = _keys(text.train, context=context)
    contexts, followed = _keys(text.held_out, context=context)
    num_contexts = torch.bincount(train_contexts, minlength=NUM_VALUES**context)[contexts]
    num_followed = torch.bincount(train_followed, minlength=NUM_VALUES ** (context + 1))[followed]
    share = (num_followed + PSEUDO_COUNT) / (num_contexts + PSEUDO_COUNT * NUM_VALUES)
    return -share.double().log().mean().item()


def final_loss(config: TrainConfig, text: Text, recipe: f8.Recipe | None, *, seed: int) -> float:
    """Train without a run folder, and return the loss at the end.

    Args:
        config: Sizes, steps and the rest, threads and device filled in.
        text: Where batches come from.
        recipe: Any recipe, also one without a name; None for bf16.
        seed: Of weights and batches.

    Returns:
        Held-out loss, nats per byte; NaN where a training loss stopped being finite.
    """
    arm = Arm(name=BF16 if recipe is None else "FP8", recipe="", seed=seed)
    with reproducible(threads=config.threads):
        trainer = Trainer(config, arm, text, recipe)
        try:
            while trainer.step < config.steps:
                trainer.gradients()
                trainer.update()
        except Failed:
            return math.nan
        return float(trainer.evaluate()["loss"])


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
