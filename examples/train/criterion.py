"""When an FP8 training counts as right: three numbers and two comparisons.

    level    what FP8 has to get below: the held-out loss of a table, counted on the same training text, of which byte
             follows which two. A model above it learnt less than counting does.
    spread   maximum minus minimum of the final held-out loss of bf16 over three seeds. A seed decides weights and
             batches, so this is how far two honest bf16 runs lie apart.
    gap      |FP8 - bf16|, final held-out loss, same seed, hence same weights and batches. Both signs count: a wrong
             scale may lower a loss by accident.

    passes   FP8 loss < level  and  gap <= spread

A scale that is wrong by a factor in an operand of the output or of grad_input fails this by far. In grad_weight alone
it cannot: AdamW divides a constant factor of a gradient out again. The bitwise tests of the quantizers see that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from examples.train.data import Text

NUM_VALUES = 256
CONTEXT = 2  # bytes that the level looks back on; the default preset gets well below that
# Lidstone's rule: one made-up observation for each context, spread over all bytes.
PSEUDO_COUNT = 1 / NUM_VALUES


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What FP8 is measured against: the level, and final losses of bf16, the first one on the seed that FP8 has."""

    level: float
    bf16_losses: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Maximum minus minimum over the seeds, nats per byte."""
        return max(self.bf16_losses) - min(self.bf16_losses)

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4f}" for loss in self.bf16_losses)
        return (
            f"bf16 over {len(self.bf16_losses)} seeds {losses}: spread {self.spread:.4f}; "
            f"level by counting {self.level:.4f} nats/byte"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one FP8 training, by its final held-out loss in nats per byte."""

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
        return (
            f"{'PASS' if self.passed else 'FAIL'} {self.name}: loss {self.loss:.4f} "
            f"(level {self.baseline.level:.4f}), gap to bf16 {self.gap:+.4f} "
            f"(spread {self.baseline.spread:.4f})"
        )


def _keys(bytes_P: torch.Tensor, *, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number each context and each context with the byte after it."""
    wide = bytes_P.long()
    places = len(wide) - context
    before = sum(wide[index : index + places] * NUM_VALUES ** (context - 1 - index) for index in range(context))
    return before, before * NUM_VALUES + wide[context:]


def counting_level(text: Text, *, context: int = CONTEXT) -> float:
    """The held-out loss, nats per byte, of predicting a byte by the ``context`` bytes before it, by counting."""
    train_contexts, train_followed = _keys(text.train, context=context)
    contexts, followed = _keys(text.held_out, context=context)
    num_contexts = torch.bincount(train_contexts, minlength=NUM_VALUES**context)[contexts]
    num_followed = torch.bincount(train_followed, minlength=NUM_VALUES ** (context + 1))[followed]
    share = (num_followed + PSEUDO_COUNT) / (num_contexts + PSEUDO_COUNT * NUM_VALUES)
    return -share.double().log().mean().item()
