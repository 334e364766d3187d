"""Loads the readings of a run's monitor from a file of JSON lines, each a flat dict (docs/monitor.md).

A line has ``step`` and entries ``fp8/<layer>/<operand>/<statistic>``; its other numbers, such as ``loss``, are curves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8compile.cli.errors import UserError

__all__ = ["Readings", "load_readings"]

PREFIX = "fp8/"
LISTS = ("exponents",)  # statistics with a number for each exponent field
NAMES = ("monitor.jsonl", "monitor*.jsonl", "*.jsonl")


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The readings of a run, in the order of steps.

    Attributes:
        source: The file.
        steps: Step of each reading.
        values: For each (layer, operand, statistic), a value per reading; None where a reading lacks the value.
        curves: For each other number in the file, such as ``loss``, its (step, value) pairs.
        notes: Parts of the file that were skipped, in words.
    """

    source: Path
    steps: tuple[int, ...]
    values: dict[tuple[str, str, str], list[Any]]
    curves: dict[str, list[tuple[int, float]]]
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order of their first appearance."""
        return list(dict.fromkeys(layer for layer, _, _ in self.values))

    def operands(self, statistic: str) -> list[str]:
        """The operands for which a statistic was recorded, in the order of their first appearance."""
        return list(dict.fromkeys(operand for _, operand, name in self.values if name == statistic))

    def rows(self, operand: str, statistic: str) -> dict[str, list[Any]]:
        """Return the values of one operand's ``statistic`` by layer: a list with a value for each reading."""
        return {
            layer: self.values[layer, operand, statistic]
            for layer in self.layers
            if (layer, operand, statistic) in self.values
        }

    def last(self, operand: str, statistic: str) -> dict[str, Any]:
        """Return the latest value of one operand's ``statistic``, by layer."""
        found = {
            layer: next((each for each in reversed(row) if each is not None), None)
            for layer, row in self.rows(operand, statistic).items()
        }
        return {layer: value for layer, value in found.items() if value is not None}


def _file(run: Path) -> Path:
    if run.is_file():
        return run
    if not run.is_dir():
        raise UserError(f"{run}: no such file or folder")
    for pattern in NAMES:
        found = sorted(run.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"{run} has {len(found)} files that end in .jsonl. Pass the file with the readings instead of the "
                "folder."
            )
    raise UserError(
        f"{run} has no monitor.jsonl. During training, write each reading of fp8compile.Monitor to it as one line of "
        "JSON, see docs/monitor.md."
    )


def _lines(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {error}") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            reading = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # a run that is going on, or was killed
                return found, ["The last line is incomplete and was skipped."]
            raise UserError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(reading, dict):
            raise UserError(f"{file}, line {number}: expected a JSON object, got a {type(reading).__name__}.")
        found.append(reading)
    return found, []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _value(statistic: str, value: Any) -> Any:
    if statistic in LISTS:
        return [float(each) for each in value] if isinstance(value, list) else None
    return _number(value)


def _matches(layer: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def load_readings(run: Path, *, layers: Iterable[str] = ("*",)) -> Readings:
    """Load the readings of a run.

    Args:
        run: The file with JSON lines, or a folder with one such file or ``monitor.jsonl``.
        layers: fnmatch patterns; only layers whose names match one are loaded.

    Raises:
        UserError: There is no such file, a line before the last is no JSON, a line with statistics has no step, or no
            layer has statistics.
    """
    file, patterns = _file(run), tuple(layers)
    lines, notes = _lines(file)
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        step = _number(line.get("step"))
        if step is None or not math.isfinite(step):
            if any(key.startswith(PREFIX) for key in line):
                raise UserError(
                    f"{file}, line {number}: the reading has no step. Add the key 'step' with the number of the "
                    "training step."
                )
            continue
        by_step.setdefault(int(step), {}).update(line)
    read = sorted(step for step, line in by_step.items() if any(key.startswith(PREFIX) for key in line))
    steps = sorted(by_step)
    keys = dict.fromkeys(key for step in read for key in by_step[step] if key.startswith(PREFIX))
    values: dict[tuple[str, str, str], list[Any]] = {}
    for key in keys:
        name, _, statistic = key.removeprefix(PREFIX).rpartition("/")
        layer, _, operand = name.rpartition("/")
        if operand and _matches(layer, patterns):
            values[layer, operand, statistic] = [_value(statistic, by_step[step].get(key)) for step in read]
    if not values:
        wanted = "" if patterns == ("*",) else f" that match {', '.join(patterns)}"
        raise UserError(
            f"{file}: no line has keys {PREFIX}<layer>/<operand>/<statistic>{wanted}. Pass a file with readings of "
            "fp8compile.Monitor, or other patterns."
        )
    curves: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for key, given in by_step[step].items():
            if key != "step" and not key.startswith(PREFIX) and (value := _number(given)) is not None:
                curves.setdefault(key, []).append((step, value))
    return Readings(source=file, steps=tuple(read), values=values, curves=curves, notes=tuple(notes))
