"""MemoryReport: what a training step holds in memory, with its formatting as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fp8compile.tables import Cell, folded, paragraph, table_lines, terminal_width
from fp8compile.testing.memory.cached import CachedCodes
from fp8compile.testing.memory.kept import KeptTensor
from fp8compile.testing.memory.timeline import OWNERS, Moment

__all__ = [
    "CODES_NUMBERS",
    "CODES_TEXT",
    "CODES_TITLE",
    "KEPT_NUMBERS",
    "MemoryReport",
    "codes_cells",
    "kept_cells",
    "moment_cells",
]

KEPT_NUMBERS = (3, 4, 5)  # columns of numbers in the table of kept tensors
CODES_NUMBERS = (2, 3)  # and in that of codes of weights
CODES_TITLE = "quantized weights, from micro-batch to micro-batch"
CODES_TEXT = (
    "The first forward quantizes them, optimizer.step quantizes them again into the same memory, and they are "
    "freed with the weight."
)
SMALLEST = 50_000  # bytes of a tensor that has a row of its own there
MODEL = "(the model)"
NAMES = {
    "parameters": "parameters, buffers",
    "weight_codes": "quantized weights",
    "inputs": "inputs",
    "kept": "saved for the backward",
    "results": "results, their gradients",
    "gradients": "new gradients",
    "temporaries": "temporaries",
}


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of one training step; ``str`` returns tables.

    Sizes are those that the step requests. Rounding and fragmentation by the allocator and workspaces of libraries are
    not included.

    Attributes:
        device: Name of the GPU, or "CPU".
        parameters: Bytes of the parameters and buffers.
        gradients: Bytes of all parameter gradients at the end of the backward.
        optimizer: Bytes of the optimizer's state.
        kept: The tensors that the forward computes and saves for the backward, excluding parameters and inputs.
        forward: The peak of the forward, without gradients and optimizer.
        backward: The peak of the backward, with the gradients computed until then, without the optimizer.
        weight_codes: Quantized weights cached between micro-batches, with ``weight_lifetime="step"``. The peaks are
            those of a micro-batch for which they are already cached.
        counted: Identical blocks whose numbers are extrapolated from code for fewer blocks, such as
            "model.layers.{1..30}"; empty if code was generated for the full model.
    """

    device: str
    parameters: int
    gradients: int
    optimizer: int
    kept: tuple[KeptTensor, ...]
    forward: Moment
    backward: Moment
    weight_codes: tuple[CachedCodes, ...] = ()
    counted: str = ""

    @property
    def kept_bytes(self) -> int:
        """Bytes of all kept tensors."""
        return sum(each.bytes for each in self.kept)

    @property
    def weight_codes_bytes(self) -> int:
        """Bytes of all quantized weights cached between micro-batches."""
        return sum(each.bytes for each in self.weight_codes)

    @property
    def step_bytes(self) -> int:
        """Peak bytes of a step: the largest of forward, backward and update, plus the optimizer's state."""
        update = self.parameters + self.gradients + self.weight_codes_bytes
        return max(self.forward.bytes, self.backward.bytes, update) + self.optimizer

    def to_dict(self) -> dict[str, Any]:
        """The report and its sums as JSON-serializable dicts, lists, strings and numbers."""
        names = ("kept_bytes", "weight_codes_bytes", "step_bytes")
        sums = {name: getattr(self, name) for name in names}
        found: dict[str, Any] = json.loads(json.dumps({**asdict(self), **sums}, default=str))
        return found

    def __str__(self) -> str:
        width = terminal_width()
        columns, *rows = moment_cells({"MB": self})
        lines = [f"memory of a training step, {self.device}", ""]
        lines += table_lines(columns, rows, width=width, right=(1,))
        if self.counted:
            lines += paragraph(
                f"{self.counted} are equal: code was generated for 2, 3 and 4 of them, and the rest were counted.",
                width=width,
            )
        heads, *kept = kept_cells(self)
        lines += ["", "saved for the backward", ""]
        lines += table_lines(list(map(str, heads)), kept, width=width, right=KEPT_NUMBERS)
        if self.weight_codes:
            heads, *codes = codes_cells(self)
            lines += ["", CODES_TITLE, "", *paragraph(CODES_TEXT, width=width), ""]
            lines += table_lines(list(map(str, heads)), codes, width=width, right=CODES_NUMBERS)
        return "\n".join(lines)


def _mb(number: int) -> str:
    return f"{number / 1e6:,.1f}"


def moment_cells(reports: dict[str, MemoryReport]) -> Iterator[tuple[str, ...]]:
    """Yield header and rows of the table of totals and peak moments in MB; each report is a column."""
    each = list(reports.values())
    yield "", *reports
    yield "parameters, buffers", *(_mb(one.parameters) for one in each)
    yield "their gradients", *(_mb(one.gradients) for one in each)
    yield "optimizer", *(_mb(one.optimizer) for one in each)
    if any(one.weight_codes for one in each):
        yield "quantized weights", *(_mb(one.weight_codes_bytes) for one in each)
    yield "saved for the backward", *(_mb(one.kept_bytes) for one in each)
    for name in ("forward", "backward"):
        moments: list[Moment] = [getattr(one, name) for one in each]
        yield f"largest moment, {name}", *(_mb(moment.bytes) for moment in moments)
        for owner in OWNERS:
            if any(getattr(moment, owner) for moment in moments):
                yield f"\N{NO-BREAK SPACE} {NAMES[owner]}", *(_mb(getattr(moment, owner)) for moment in moments)
    yield "the step, with the optimizer", *(_mb(one.step_bytes) for one in each)


def _size(tensor: KeptTensor) -> str:
    return f"{' x '.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def _operators(names: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(name.split(".")[1] if "." in name else name for name in names))


def _content(tensor: KeptTensor) -> tuple[str, ...]:
    codes = "-" if tensor.code_bytes is None else _mb(tensor.code_bytes)
    moved = "-" if tensor.moved is None else f"{tensor.moved / 1e6:+,.1f}"
    return _operators(tensor.read_by), _size(tensor), _mb(tensor.bytes), codes, moved


def kept_cells(report: MemoryReport) -> Iterator[tuple[Cell, ...]]:
    """Yield header and rows of the table of saved tensors, largest first.

    Tensors of equal layers share a row, with the MB of one tensor. All tensors of less than 0.05 MB share the last
    row.
    """
    yield "created in", "read by", "shape", "MB", "in FP8", "moved"
    large = sorted((each for each in report.kept if each.bytes >= SMALLEST), key=lambda each: -each.bytes)
    rows = folded((each.module or MODEL, _content(each)) for each in large)
    yield from ((name, *content) for name, content in rows)
    small = [each.bytes for each in report.kept if each.bytes < SMALLEST]
    if small:
        yield f"{len(small)} smaller ones", "", "", _mb(sum(small)), "-", "-"


def codes_cells(report: MemoryReport) -> Iterator[tuple[Cell, ...]]:
    """Yield header and rows of the table of codes of weights; equal layers share a row."""
    yield "weight", "shape", "versions", "MB"
    rows = (
        (each.parameter, (" x ".join(map(str, each.shape)), str(each.sets), _mb(each.bytes)))
        for each in report.weight_codes
    )
    yield from ((name, *content) for name, content in folded(rows))
