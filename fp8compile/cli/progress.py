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

    def _text(self, step: int, loss: float, pace: float | None) -> str:
        shown = f"  {pace:,.0f} tokens/s" if pace is not None else ""
        return f"{self._arm}: step {step}/{self._steps}  loss {loss:.4f}{self._held_out}{shown}"

    def trained(self, step: int, loss: float, pace: float | None) -> None:
        """Show a step.

        Args:
            step: Updates done.
            loss: Of its batch, nats per byte.
            pace: Tokens per second so far; None if not known.
        """
        text = self._text(step, loss, pace)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step == 1 or step % self._every == 0 or step == self._steps:
            print(text, flush=True)

    def evaluated(self, step: int, loss: float) -> None:
        """Show a held-out loss.

        Args:
            step: Updates done.
            loss: Nats per byte.
        """
        self._held_out = f"  held-out {loss:.4f}"
        if self._bar is None:
            print(f"{self._arm}: step {step}/{self._steps}{self._held_out}", flush=True)
