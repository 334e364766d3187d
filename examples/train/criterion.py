"""The criterion by which an FP8 training passes: three numbers and two comparisons.

    level    the held-out loss of a table that counts, in the training text, which byte follows each two bytes. A model
             with a loss above the level has learnt less than counting.
    spread   maximum minus minimum of bf16's final held-out loss over three seeds. A seed decides weights and batches,
             so the spread is a typical distance between two correct runs.
    gap      |FP8 - bf16| of the final held-out losses for the same seed, and so the same weights and batches. A lower
             loss than bf16's counts too, because a wrong scale may lower a loss by accident.

    passes   FP8 loss < level  and  gap <= spread

A scale that is wrong by a factor in an operand of the output or of grad_input fails the criterion by far. In
grad_weight alone it does not fail, because AdamW divides out a constant factor of a gradient. The quantizers' bitwise
tests find that fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from examples.train.data import Text

NUM_VALUES = 256
CONTEXT = 2  # number of bytes before a byte that the level's table uses; the default preset gets well below the level
# Lidstone's rule: one pseudo-observation for each context, spread over all bytes.
PSEUDO_COUNT = 1 / NUM_VALUES


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The numbers that FP8 is compared with: the level, and bf16's final losses, the first for the seed of FP8."""

    level: float
    bf16_losses: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Maximum minus minimum of bf16's losses over the seeds, in nats per byte."""
        return max(self.bf16_losses) - min(self.bf16_losses)

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4f}" for loss in self.bf16_losses)
        return (
            f"bf16 over {len(self.bf16_losses)} seeds {losses}: spread {self.spread:.4f}; "
            f"level by counting {self.level:.4f} nats/byte"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The criterion applied to one FP8 training, by its final held-out loss in nats per byte."""

    name: str
    loss: float
    baseline: Baseline

    @property
    def gap(self) -> float:
        """Loss of FP8 minus loss of bf16 for the same seed, in nats per byte."""
        return self.loss - self.baseline.bf16_losses[0]

    @property
    def passed(self) -> bool:
        """Whether the criterion holds; it does not for a loss of NaN."""
        return self.loss < self.baseline.level and abs(self.gap) <= self.baseline.spread

    def __str__(self) -> str:
        return (
            f"{'PASS' if self.passed else 'FAIL'} {self.name}: loss {self.loss:.4f} "
            f"(level {self.baseline.level:.4f}), gap to bf16 {self.gap:+.4f} "
            f"(spread {self.baseline.spread:.4f})"
        )


def _keys(bytes_P: torch.Tensor, *, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that identify, for each place of the text, the bytes before it, and those bytes with the next one."""
    wide = bytes_P.long()
    places = len(wide) - context
    before = sum(wide[index : index + places] * NUM_VALUES ** (context - 1 - index) for index in range(context))
    return before, before * NUM_VALUES + wide[context:]


def counting_level(text: Text, *, context: int = CONTEXT) -> float:
    """The held-out loss, in nats per byte, if a byte is predicted by counts of what follows ``context`` bytes."""
    train_contexts, train_followed = _keys(text.train, context=context)
    contexts, followed = _keys(text.held_out, context=context)
    num_contexts = torch.bincount(train_contexts, minlength=NUM_VALUES**context)[contexts]
    num_followed = torch.bincount(train_followed, minlength=NUM_VALUES ** (context + 1))[followed]
    share = (num_followed + PSEUDO_COUNT) / (num_contexts + PSEUDO_COUNT * NUM_VALUES)
    return -share.double().log().mean().item()
