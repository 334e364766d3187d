"""Times of things that run in turns: a machine that slows down slows all of them, and the ratio of medians stays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["device", "medians", "milliseconds", "where"]

Step = Callable[[], object]
CALLS = {"cuda": 10, "cpu": 2}  # a round, so that its time is well above the clock's and the launch's


def device() -> str:
    """What benchmarks run on: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def where() -> str:
    """Its name, for titles."""
    return torch.cuda.get_device_name() if device() == "cuda" else "CPU"


def milliseconds(step: Step, calls: int | None = None) -> float:
    """Of one call, over a round of them."""
    calls = calls or CALLS[device()]
    if device() == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls
    began = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - began) * 1e3 / calls


def medians(steps: Mapping[str, Step], rounds: int, calls: int | None = None) -> dict[str, float]:
    """Median milliseconds of one call of each, after one round that counts for nothing."""
    for step in steps.values():
        milliseconds(step, calls)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, calls))
    return {name: statistics.median(values) for name, values in times.items()}
