"""Sections of `fp8compile explain --memory`: what a training step holds in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8compile.cli.section import Section
from fp8compile.testing.memory.report import (
    CODES_NUMBERS,
    CODES_TEXT,
    CODES_TITLE,
    KEPT_NUMBERS,
    codes_cells,
    kept_cells,
    moment_cells,
)

if TYPE_CHECKING:
    from fp8compile.testing.memory import MemoryReport

__all__ = ["memory_sections"]

MOMENTS = (
    "Memory that the program allocates, in MB (10**6 bytes), computed from the code that Inductor generates; "
    "nothing was run. The optimizer is AdamW with states in the parameters' dtype. Workspaces of libraries and "
    "gaps between tensors are not included."
)
KEPT = (
    "Tensors that the forward of this model computes and saves. In FP8: e4m3 with scales, in the blocks of the "
    "recipe that is used next to the tensor. Moved: additional MB that a step reads and writes at least, if the "
    "tensor is saved in FP8."
)


def memory_sections(reports: dict[str, MemoryReport]) -> Iterator[Section]:
    """Yield tables: memory at moments of a step, tensors saved for the backward and, if any are kept, weight codes.

    The first table has a column for each of ``reports``, under its key; later tables show only the first report.
    """
    first = next(iter(reports.values()))
    columns, *rows = moment_cells(reports)
    counted = dict.fromkeys(each.counted for each in reports.values() if each.counted)
    lines = (
        MOMENTS,
        *(
            f"{each} are equal: code was generated for 2, 3 and 4 of them, and the rest were counted."
            for each in counted
        ),
    )
    numbers = tuple(range(1, 1 + len(reports)))
    yield Section(
        title=f"memory of a training step, {first.device}", lines=lines, columns=columns, rows=rows, numbers=numbers
    )
    heads, *kept = kept_cells(first)
    yield Section(
        title="saved for the backward", lines=(KEPT,), columns=tuple(map(str, heads)), rows=kept, numbers=KEPT_NUMBERS
    )
    if first.weight_codes:
        heads, *codes = codes_cells(first)
        columns = tuple(map(str, heads))
        yield Section(title=CODES_TITLE, lines=(CODES_TEXT,), columns=columns, rows=codes, numbers=CODES_NUMBERS)
