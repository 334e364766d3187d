"""Summary of a run's notable readings: NaN, saturation, underflow, low signal-to-noise ratios."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8compile.cli.monitor.readings import Readings
from fp8compile.cli.section import Section

__all__ = ["summary"]

MOST = 8  # rows of each kind
# the share of elements from which on an operand is listed, and the word for it
LISTED = {"saturation": (1e-4, "saturates"), "underflow": (0.1, "underflows")}


def _nonfinite(readings: Readings) -> list[tuple[str, str, str, str]]:
    found = []
    for (layer, operand, statistic), row in readings.values.items():
        if statistic != "nonfinite":
            continue
        first = next((at for at, each in enumerate(row) if each), None)
        if first is not None:
            count = f"{row[first]:g} elements" if math.isfinite(row[first]) else "elements"
            found.append((readings.steps[first], layer, operand, f"NaN or infinite: {count} in step"))
    first_step = min((each[0] for each in found), default=0)
    return [
        (layer or "the model", operand, f"{words} {step}", str(step))
        for step, layer, operand, words in found
        if step == first_step
    ][:MOST]


def _extremes(readings: Readings, statistic: str, *, least: bool) -> Iterator[tuple[float, str, str]]:
    for operand in readings.operands(statistic):
        for layer, value in readings.last(operand, statistic).items():
            if math.isfinite(value):
                yield (value if least else -value), layer or "the model", operand


def summary(readings: Readings) -> Section:
    """Return the table of notable readings; rows about NaN are highlighted.

    Of the steps with NaN or infinite elements, only the first is listed, because it usually causes the later ones.
    """
    rows: list[tuple[str, ...]] = [each[:3] for each in _nonfinite(readings)]
    loud = frozenset(range(len(rows)))
    for statistic, (threshold, word) in LISTED.items():
        found = sorted(_extremes(readings, statistic, least=False))
        rows += [(layer, operand, f"{word}: {-v:.2%}") for v, layer, operand in found if -v >= threshold][:MOST]
    coarse = sorted(_extremes(readings, "sqnr", least=True))[:3]
    rows += [(layer, operand, f"among the lowest signal-to-noise ratios: {v:.1f} dB") for v, layer, operand in coarse]
    count = len(readings.steps)
    lines = [
        f"{count} {'reading' if count == 1 else 'readings'} of {len(readings.layers)} layers, steps "
        f"{readings.steps[0]} to {readings.steps[-1]}.",
        *readings.notes,
    ]
    if not rows:
        lines.append("Nothing stands out: no NaN, and no operand saturates or underflows much.")
    return Section(
        title="what stands out",
        lines=tuple(lines),
        columns=("layer", "operand", "finding"),
        rows=tuple(rows),
        loud=loud,
    )
