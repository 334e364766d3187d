"""Times of things that run in turns: a machine that slows down slows all of them, and the ratio of medians stays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from benchmarks.machine import machine

__all__ = ["device", "fastest", "medians", "milliseconds", "where"]

Step = Callable[[], object]


def device() -> str:
    """Where tensors of benchmarks lie: on the GPU if there is one."""
    return machine().device


def where() -> str:
    """The machine's name, for titles."""
    return machine().name()


def milliseconds(step: Step, calls: int | None = None) -> float:
    """Milliseconds that one call takes, the mean of a round of them."""
    return machine().milliseconds(step, calls or machine().calls)


def medians(steps: Mapping[str, Step], rounds: int, calls: int | None = None) -> dict[str, float]:
    """Median milliseconds of one call of each, after one round that counts for nothing."""
    return {name: statistics.median(values) for name, values in _times(steps, rounds, calls).items()}


def fastest(steps: Mapping[str, Step], rounds: int, calls: int | None = None) -> dict[str, float]:
    """Milliseconds of one call of each in its fastest round: what else runs on a machine can only add to a call."""
    return {name: min(values) for name, values in _times(steps, rounds, calls).items()}


def _times(steps: Mapping[str, Step], rounds: int, calls: int | None) -> dict[str, list[float]]:
    for step in steps.values():
        milliseconds(step, calls)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, calls))
    return times
