"""Finds where a NaN comes from: the first line of a kernel, GEMM or operator that produces it.

    launch stores a NaN --its programs run again, watched--> each value has the number of the step that made its NaN

A step is a line that produces a NaN, or that reads one from memory. The launch's results are those of the unwatched
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.testing.gpu.program.memory import Access
from fp8compile.testing.gpu.program.nan_watch import Watch

__all__ = ["NanOrigin", "NanSearch", "has_nan"]


@dataclass(frozen=True, kw_only=True)
class NanOrigin:
    """Where a graph's first NaN comes from: the step that produces it, or reads it from memory.

    Attributes:
        graph: "forward" or "backward".
        name: Name of the kernel; for a GEMM or operator, a description of the call.
        is_made: Whether the step produces the NaN; if not, it reads a NaN that no step of the graph has produced.
        place: File and line of the kernel; "" for a GEMM or operator.
        line: The line's text.
        operands: The operands' numbers where the NaN is produced, such as "inf and inf", or a description of them.
        tensor: The kernel's argument, and its element, that the NaN is stored to or read from, in words.
    """

    graph: str
    name: str
    is_made: bool
    place: str = ""
    line: str = ""
    operands: str = ""
    tensor: str = ""

    def __str__(self) -> str:
        verb = "makes" if self.is_made else "reads"
        where = f", {self.place}: `{self.line}`" if self.place else ""
        of = f", of {self.operands}" if self.operands else ""
        tensor = f"; {self.tensor}" if self.tensor else ""
        return f"NaN: in the {self.graph} {self.name} {verb} the first one{where}{of}{tensor}"


@dataclass
class NanSearch:
    """Searches for the origin of a graph's NaN in the launches and GEMMs of all its runs.

    Attributes:
        graph: "forward" or "backward".
        origin: The first step found so far that produces a NaN, or else the first that reads one.
        shows: Whether a run has put a NaN into an argument that had none.
    """

    graph: str
    origin: NanOrigin | None = None
    shows: bool = False
    _inputs: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether a step that produces a NaN has been found."""
        return self.origin is not None and self.origin.is_made

    def begin(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Store the addresses of a graph's inputs by name, to name the input that a NaN was read from."""
        self._inputs = [
            (start := each.untyped_storage().data_ptr(), start + each.untyped_storage().nbytes(), name)
            for name, each in zip(names, values, strict=True)
            if isinstance(each, Tensor)
        ]

    def found(self, name: str, **about: Any) -> None:
        """Store the step in kernel or operator ``name`` as the origin, unless the stored origin is as good.

        ``about`` has the other fields of `NanOrigin`. A step that produces a NaN is better than a step that reads it.
        """
        new = NanOrigin(graph=self.graph, name=name, **about)
        if self.origin is None or (new.is_made and not self.origin.is_made):
            self.origin = new

    def computed(self, name: Any, operands: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Store a GEMM or library operator as origin if a result has a NaN; ``operands`` maps names to tensors.

        ``name`` is converted to text only if a result has a NaN.
        """
        if self.is_over or not any(has_nan(each) for each in results):
            return
        given = {each: value for each, value in operands.items() if isinstance(value, Tensor)}
        nans = [each for each, value in given.items() if has_nan(value)]
        infinite = [f"an infinity in the {each}" for each, value in given.items() if _has_infinity(value)]
        if nans:
            memory = self.memory(_address(given[nans[0]]), unwritten="")
            self.found(str(name), is_made=False, tensor=f"from the {nans[0]}" + (f", {memory}" if memory else ""))
        elif infinite:
            self.found(str(name), is_made=True, operands=" and ".join(infinite))
        else:
            self.found(str(name), is_made=False, tensor="elements that it leaves unwritten")

    def memory(self, address: int, unwritten: str = "memory that nobody has written") -> str:
        """Describe what contains an address: an input of the graph, or else ``unwritten``."""
        name = next((name for start, end, name in self._inputs if start <= address < end), None)
        return unwritten if name is None else f"the graph's input {name}"

    @contextmanager
    def watching(self, access: Access, frames: Callable[[], Iterator[tuple[str, int]]]) -> Iterator[None]:
        """Context in which Triton programs run again, watched; at exit, the origin that was found is stored.

        Args:
            access: The record of the launch.
            frames: Yields files and lines of the kernel and the functions that it has called, innermost first.
        """
        watch = Watch(access, frames, self.memory)
        with ExitStack() as stack:
            for owner, name, value in watch.patches():
                stack.enter_context(mock.patch.object(owner, name, value))
            yield
        if (step := watch.first) is not None:
            self.found(
                access.name, is_made=step.is_made, place=step.place, line=step.line, operands=step.operands,
                tensor=f"stored to {step.stored_to}" if step.is_made else step.read_from,
            )  # fmt: skip


def has_nan(value: Any) -> bool:
    """Whether a tensor has a NaN; False for bytes, integers and anything that is no tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize == 0:
        return False
    return value.dtype != torch.float4_e2m1fn_x2 and bool(value.float().isnan().any())


def _address(value: Tensor) -> int:
    place = value.float().isnan().nonzero()[0].tolist()
    offset = sum(at * stride for at, stride in zip(place, value.stride(), strict=True))
    return value.data_ptr() + offset * value.element_size()


def _has_infinity(value: Tensor) -> bool:
    return (
        value.is_floating_point()
        and value.dtype != torch.float4_e2m1fn_x2
        and not bool(value.float().isfinite().all())
    )
