"""Ctrl-C and SIGTERM: at once while nothing can be torn, after the update of a step otherwise.

Ranks that need each other stop between the same two steps: a signal to any of them is one to all.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8compile.cli.errors import Stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from fp8compile.cli.train.ranks import Ranks

__all__ = ["Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns the two signals into :class:`Stopped`; use it as a context manager.

    A signal is acted on at once, however long the compiler still takes, but for the stretches
    under :meth:`held`: there it waits, so that parameters, optimizer state and step stay in tune.
    Of several ranks, each waits for :meth:`turn`.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Start with no signal seen."""
        self._ranks = ranks
        self._holding = ranks.size > 1
        self._pending: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        """Take the signals over."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending = number
        if not self._holding:
            self._check()

    def turn(self) -> None:
        """Raise :class:`Stopped` if a signal came, to this rank or to another one.

        Python drops an exception raised inside a destructor or a weak reference's callback, so
        loops call this once a turn, all ranks in the same one.
        """
        # What comes while the ranks tell each other, no other one knows of: it waits for the next turn.
        if found := self._ranks.largest(self._pending or 0):
            self._pending = found
            self._check()

    def _check(self) -> None:
        if self._pending is not None:
            name = signal.Signals(self._pending).name
            raise Stopped(f"stopped by {name}", exit_code=128 + self._pending)

    def clear(self) -> None:
        """Forget the signal, before what is still to be done because of it."""
        self._pending = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal wait for the end of the block."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before
        if not before:
            self._check()
