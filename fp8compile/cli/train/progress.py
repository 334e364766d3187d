"""The line that shows how a training goes: live on a terminal, now and then in a log."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["ProgressLine"]

LINES_PER_ARM = 10


class ProgressLine:
    """Shows one arm; use it as a context manager.

    Args:
        arm: Its name.
        first: Steps done before.
        steps: Steps in all.
    """

    def __init__(self, arm: str, *, first: int, steps: int) -> None:
        """Decide by standard output's kind; nothing is shown yet."""
        self._arm, self._steps = arm, steps
        self._held_out = ""
        self._trained = f"{arm}: step {first}/{steps}"
        self._pace = ""
        self._every = max(1, steps // LINES_PER_ARM)
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console())
            self._task = self._bar.add_task(f"{arm}: compiling", total=steps, completed=first)

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is, and the cursor below it."""
        if self._bar is not None:
            self._bar.stop()

    @property
    def _text(self) -> str:
        return f"{self._trained}{self._held_out}{self._pace}"

    def trained(self, step: int, loss: float, pace: float | None) -> None:
        """Show a step.

        Args:
            step: Updates done.
            loss: Of its batch, nats per byte.
            pace: Tokens per second so far; None if not known.
        """
        self._trained = f"{self._arm}: step {step}/{self._steps}  loss {loss:.4f}"
        self._pace = f"  {pace:,.0f} tokens/s" if pace is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._text)
        elif step == 1 or step % self._every == 0 or step == self._steps:
            print(self._text, flush=True)

    def evaluated(self, step: int, loss: float) -> None:
        """Show a held-out loss.

        Args:
            step: Updates done.
            loss: Nats per byte.
        """
        self._held_out = f"  held-out {loss:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, description=self._text)
        else:
            print(f"{self._arm}: step {step}/{self._steps}{self._held_out}", flush=True)
