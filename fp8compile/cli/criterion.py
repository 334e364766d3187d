"""When an FP8 training counts as right: three numbers and two comparisons.

    level    what the model has to get below: the held-out loss of a table of byte triples, counted
             on the same training text. Who only learnt which byte follows which two stays above.
    spread   maximum minus minimum of the final held-out loss of bf16 over three seeds. A seed
             decides weights and batches, so this is how far two honest bf16 runs lie apart. Of
             three numbers the range is the whole of what is known; a standard deviation would
             suggest more, and is narrower.
    gap      |FP8 - bf16|, final held-out loss, same seed, hence same weights and batches. Both
             signs count: a wrong scale may lower a loss by accident.

    passes   FP8 loss < level  and  gap <= spread
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fp8compile.cli.config import BF16, NUM_SPREAD_SEEDS, Arm
from fp8compile.cli.errors import Failed
from fp8compile.cli.trainer import Trainer, reproducible

if TYPE_CHECKING:
    import fp8compile as f8
    from fp8compile.cli.config import TrainConfig
    from fp8compile.cli.text import Text

__all__ = ["Baseline", "Verdict", "baseline", "counting_level", "final_loss"]

NUM_VALUES = 256
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
            f"level (byte triples) {self.level:.4f} nats/byte"
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


def counting_level(text: Text) -> float:
    """Return the held-out loss of predicting a byte by the two before it, by counting.

    Args:
        text: Counted on its training part, scored on its held-out tail.

    Returns:
        Nats per byte.
    """

    def pairs_and_triples(bytes_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = bytes_P.long()
        pairs = wide[:-2] * NUM_VALUES + wide[1:-1]
        return pairs, pairs * NUM_VALUES + wide[2:]

    train_pairs, train_triples = pairs_and_triples(text.train)
    pairs, triples = pairs_and_triples(text.held_out)
    num_pairs = torch.bincount(train_pairs, minlength=NUM_VALUES**2)[pairs]
    num_triples = torch.bincount(train_triples, minlength=NUM_VALUES**3)[triples]
    share = (num_triples + PSEUDO_COUNT) / (num_pairs + PSEUDO_COUNT * NUM_VALUES)
    return -share.double().log().mean().item()


def final_loss(
    config: TrainConfig, text: Text, recipe: f8.Recipe | None, *, seed: int
) -> float:
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


def baseline(config: TrainConfig, text: Text) -> Baseline:
    """Train bf16 on each seed.

    Args:
        config: As for :func:`final_loss`; its seed is the first.
        text: Where batches come from.

    Returns:
        Level and losses.
    """
    seeds = range(config.seed, config.seed + NUM_SPREAD_SEEDS)
    losses = tuple(final_loss(config, text, None, seed=seed) for seed in seeds)
    return Baseline(level=counting_level(text), bf16_losses=losses)
