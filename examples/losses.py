"""What the examples share: their options, batches of text, and losses beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

import fp8compile as f8
from examples.train.data import Text, load_text, training_batch
from examples.train.layout import all_values, is_first

ROWS, SEQUENCE, LAST = 8, 64, 5  # of a rank's batch; steps that a mean of the last ones takes
VOCABULARY = 256  # a token is a byte


def options(description: str | None, *, recipe: str = "rowwise", steps: int = 40) -> argparse.Namespace:
    """Options of an example: ``--recipe``, one of `fp8compile.recipes`, and ``--steps``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default=recipe, choices=f8.recipes.names(), help=f"default {recipe}")
    parser.add_argument("--steps", default=steps, type=int, help=f"default {steps}")
    return parser.parse_args()


def device() -> torch.device:
    """The GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def _text() -> Text:
    return load_text(None, batch=ROWS, seq=SEQUENCE)


def batch(step: int, *, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """This rank's bytes of Python's standard library in a step, and the byte after each: int64, (ROWS, SEQUENCE)."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    tokens, targets = training_batch(_text(), seed=rank, step=step, batch=ROWS, seq=SEQUENCE)
    return tokens.to(device()), targets.to(device())


def mean_over_ranks(loss: Tensor) -> float:
    """The mean of the ranks' losses, added in their order, so that all have the same digits."""
    every = all_values(loss.item())
    return sum(every) / len(every)


def show(losses: dict[str, list[float]], *, same: Sequence[str] = ()) -> None:
    """Print the losses of some trainings beside each other.

    Args:
        losses: Those of each step, by the training's name.
        same: Names whose losses are to be the same digits; if they are not, the program ends with an error.
    """
    if not is_first():
        return
    width = max(map(len, losses))
    print(f"{'':{width}}  {'first':>9}  {f'last {LAST}':>9}")
    for name, values in losses.items():
        last = values[-LAST:]
        print(f"{name:{width}}  {values[0]:9.5f}  {sum(last) / len(last):9.5f}")
    for name in same[1:]:
        most = max(abs(a - b) for a, b in zip(losses[same[0]], losses[name], strict=True))
        print(f"{same[0]} and {name}: largest difference {most}")
        if most:
            raise SystemExit("these were to be the same digits")
