"""Comparison: the differences between two runs of a model, module by module, and how they grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.tables import paragraph, table_lines, terminal_width
from fp8compile.testing.numerics.decibels import shown_decibels

__all__ = ["Comparison", "ComparisonRow"]


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Comparison of one module in one pass. Ratios are signal-to-noise ratios in dB, ``inf`` if equal.

    Attributes:
        name: Fully qualified name; with a number from the module's second call on.
        kind: Class of the module; if the model and the reference have different classes, both.
        direction: ``"forward"`` or ``"backward"``.
        arriving: The ratio of what the module receives: input or grad_output. None without a floating-point tensor.
        leaving: The ratio of what the module returns: output or grad_input. None if there is none.
        own: The ratio of the module's output or grad_input when it is run on the reference's input and grad_output.
        own_weight: The smallest ratio of the parameters' gradients from the same run; None in the forward.
    """

    name: str
    kind: str
    direction: str
    arriving: float | None
    leaving: float | None
    own: float | None
    own_weight: float | None = None

    @property
    def least_own(self) -> float:
        """The smaller of ``own`` and ``own_weight``; ``inf`` if neither was measured, ``-inf`` for a NaN."""
        known = [each for each in (self.own, self.own_weight) if each is not None]
        return -math.inf if any(map(math.isnan, known)) else min(known, default=math.inf)

    @property
    def is_equal(self) -> bool:
        """Whether the module, run on the reference's inputs, gives equal numbers; True if nothing was measured."""
        return self.least_own == math.inf


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`. It prints as a table.

    Attributes:
        rows: The modules in the order in which they run: forward, then backward.
        losses: The losses of the model and of the reference.
        missing: Names of modules that only the model or only the reference has or calls.
    """

    rows: tuple[ComparisonRow, ...]
    losses: tuple[float, float]
    missing: tuple[str, ...]

    @property
    def first(self) -> ComparisonRow | None:
        """The first module in execution order that, run alone, differs from the reference; None if none does."""
        return next((row for row in self.rows if not row.is_equal), None)

    @property
    def worst(self) -> ComparisonRow | None:
        """The module that adds the largest difference; None if none does."""
        differing = [row for row in self.rows if not row.is_equal]
        return min(differing, key=lambda row: row.least_own, default=None)

    @property
    def between_modules(self) -> ComparisonRow | None:
        """The first module that gets a different input, if no module before it adds a difference; else None.

        Such a difference arises in code between modules, such as an attention function or a sum.
        """
        for row in self.rows:
            if row.arriving is not None and row.arriving != math.inf:
                return row
            if not row.is_equal:
                return None
        return None

    def verdict(self) -> list[str]:
        """Sentences that say which module, or code between modules, causes the difference."""
        lines = [f"loss {self.losses[0]:.6g}, reference {self.losses[1]:.6g}"]
        if self.missing:
            lines.append(f"only in one of the two: {', '.join(self.missing)}")
        if (row := self.between_modules) is not None:
            what = "input" if row.direction == "forward" else "grad_output"
            lines.append(
                f"it arises before {row.name or 'the model'}, outside of modules: its {what} differs "
                f"({shown_decibels(row.arriving)} dB), but each module before it returned the reference's result"
            )
        elif self.first is None:
            lines.append("every module returns the reference's result, bit for bit")
        if self.first is not None:
            lines.append(f"first module that differs: {_said(self.first)}")
        if self.worst is not None and self.worst is not self.first:
            lines.append(f"largest own difference: {_said(self.worst)}")
        return lines

    def table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Headings and rows of the table."""
        columns = ["module", "class", "pass", "arrives", "own", "own, parameters", "leaves"]
        rows: Sequence[tuple[Any, ...]] = [
            (
                row.name or "the model", row.kind, row.direction,
                *map(shown_decibels, (row.arriving, row.own, row.own_weight, row.leaving)),
            )
            for row in self.rows
        ]  # fmt: skip
        return columns, list(rows)

    def __str__(self) -> str:
        """The verdict, and a table row for each module and pass."""
        width = terminal_width()
        columns, rows = self.table()
        lines = [line for each in self.verdict() for line in paragraph(each, width=width)]
        return "\n".join([*lines, *table_lines(columns, rows, width=width)])


def _said(row: ComparisonRow) -> str:
    return f"{row.name or 'the model'} ({row.kind}), {row.direction}, {shown_decibels(row.least_own)} dB"
