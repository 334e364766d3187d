"""Ctrl-C and SIGTERM: at once while nothing can be torn, after the update of a step otherwise."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8compile.cli.errors import Stopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Interrupts"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns the two signals into :class:`Stopped`; use it as a context manager.

    A signal is acted on at once, however long the compiler still takes, but for the stretches
    under :meth:`held`: there it waits, so that parameters, optimizer state and step stay in tune.
    """

    def __init__(self) -> None:
        """Start with no signal seen."""
        self._holding = False
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
            self.check()

    def check(self) -> None:
        """Raise :class:`Stopped` if a signal came.

        Python drops an exception raised inside a destructor or a weak reference's callback, so
        loops call this once a turn.
        """
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
            self.check()
