"""Summary of a run's unusual readings: NaN, saturation, underflow, low signal-to-noise ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from fp8compile.cli.monitor.readings import Readings
from fp8compile.cli.section import Section

__all__ = ["summary"]

MOST = 8  # rows of each kind
# What is listed. An operand is compared with its median over the layers, because a usual value depends on the format:
# of normally distributed weights, NVFP4 turns about 10% into zero, e4m3 hardly any.
SATURATION = 1e-4  # fraction of elements
UNDERFLOW = 0.2  # fraction of elements; half of it if it is twice the median
SQNR = 6.0  # dB below the median: one bit


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


def _median(values: Iterable[float]) -> float:
    return statistics.median([value for value in values if math.isfinite(value)] or [0.0])


def _is_unusual(statistic: str, value: float, median: float) -> bool:
    if statistic == "saturation":
        return value >= SATURATION
    if statistic == "underflow":
        return value >= UNDERFLOW or value >= max(UNDERFLOW / 2, 2 * median)
    return value <= median - SQNR


def _words(statistic: str, value: float, median: float) -> str:
    if statistic == "sqnr":
        return f"low signal-to-noise ratio: {value:.1f} dB (median of the layers: {median:.1f} dB)"
    return f"{'saturates' if statistic == 'saturation' else 'underflows'}: {value:.2%}"


def _unusual(readings: Readings, statistic: str) -> list[tuple[str, str, str]]:
    """Return rows on the last reading, the worst first; operands with equal findings share a row."""
    found: dict[tuple[float, str, str], list[str]] = {}
    for operand in readings.operands(statistic):
        values = readings.last(operand, statistic)
        median = _median(values.values())
        for layer, value in values.items():
            if math.isfinite(value) and _is_unusual(statistic, value, median):
                worst_first = value if statistic == "sqnr" else -value
                found.setdefault((worst_first, layer, _words(statistic, value, median)), []).append(operand)
    rows = [
        (layer or "the model", ", ".join(operands), words) for (_, layer, words), operands in sorted(found.items())
    ]
    return rows[:MOST]


def summary(readings: Readings) -> Section:
    """Return the table of unusual readings; rows about NaN are highlighted.

    Of the steps with NaN or infinite elements, only the first is listed, because it usually causes the later ones.
    """
    rows: list[tuple[str, ...]] = [each[:3] for each in _nonfinite(readings)]
    loud = frozenset(range(len(rows)))
    for statistic in ("saturation", "underflow", "sqnr"):
        rows += _unusual(readings, statistic)
    count, layers = len(readings.steps), len(readings.layers)
    lines = [
        f"{count} {'reading' if count == 1 else 'readings'} of {layers} {'layer' if layers == 1 else 'layers'}, steps "
        f"{readings.steps[0]} to {readings.steps[-1]}.",
        *readings.notes,
    ]
    if not rows:
        lines.append("Nothing unusual was found.")
    return Section(
        title="Findings",
        lines=tuple(lines),
        columns=("layer", "operand", "finding") if rows else (),
        rows=tuple(rows),
        loud=loud,
    )
