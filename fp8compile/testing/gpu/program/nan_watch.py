"""Follows NaN through a kernel: tags the interpreter's values with the step that made their NaN."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle as Handle

from fp8compile.testing.gpu.program import functions
from fp8compile.testing.gpu.program.arithmetic import STORED_AS, convert
from fp8compile.testing.gpu.program.batches import along
from fp8compile.testing.gpu.program.memory import Access

__all__ = ["Step", "Watch", "is_code", "is_odd", "nans"]

CODE = 0x7F  # low bits of a NaN's code in e4m3 and e8m0, and of one in e5m2
# they move elements; the numbers are of the operands that they move
MOVES: dict[str, tuple[int, ...]] = {
    "create_splat": (1,), "create_broadcast": (0,), "create_expand_dims": (0,), "create_reshape": (0,),
    "create_trans": (0,), "create_unsplat": (0,), "create_split": (0,), "create_cat": (0, 1), "create_join": (0, 1),
    "create_gather": (0,),
}  # fmt: skip
LOADS = ("create_masked_load", "create_atomic_rmw")
STORES = {"create_masked_store": (0, 1, 2), "create_atomic_rmw": (1, 2, 3)}  # places of address, value and mask
WHOLE = ("create_dot", "create_dot_scaled", "create_histogram", "create_inline_asm")  # an element depends on many
LIBRARIES = ("/triton/language/", "/torch/_inductor/runtime/")  # whose functions kernels call
NONE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Step:
    """A line of a kernel that produces a NaN, or reads one from memory.

    Attributes:
        is_made: Whether the line produces the NaN.
        place: File and line.
        line: The line's text.
        operands: The operands' numbers where a NaN is produced, or a description of them.
        read_from: Description of the memory that a NaN is read from.
        stored_to: Description of where the NaN is stored first; "" if it is not stored.
    """

    is_made: bool
    place: str
    line: str
    operands: str = ""
    read_from: str = ""
    stored_to: str = ""


# ---------------------------------------------------------------------------------- which elements are NaN


def _kind(handle: Handle) -> Any:
    return handle.dtype.scalar


def nans(handle: Handle) -> np.ndarray | None:
    """Mask of the NaN among the elements of an interpreter's handle; None if its type has no NaN."""
    kind = _kind(handle)
    if not kind.is_floating() or handle.data.dtype == bool:  # the interpreter keeps the type of what is compared
        return None
    if handle.data.dtype.kind == "f":
        return np.isnan(handle.data)
    if kind == tl.bfloat16:
        return (handle.data & 0x7FFF) > 0x7F80
    return (handle.data & CODE) > (0x7C if kind == tl.float8e5 else 0x7E)


def is_odd(handle: Handle) -> bool:
    """Whether any element of an interpreter's handle is infinite or NaN."""
    kind, data = _kind(handle), handle.data
    if not kind.is_floating():
        return False
    if data.dtype.kind == "f":
        return not np.isfinite(data).all()
    if kind == tl.bfloat16:
        return bool(((data & 0x7F80) == 0x7F80).any())
    return bool(((data & CODE) >= (0x7C if kind == tl.float8e5 else 0x7F)).any())


def is_code(handle: Handle) -> np.ndarray | None:
    """Mask of the 8-bit integers that may be the code of a NaN; None if the handle has another type."""
    is_bytes = _kind(handle) in (tl.uint8, tl.int8)
    return (handle.data & CODE) >= (CODE - 2) if is_bytes else None


def _shown(handle: Handle, at: tuple[int, ...], shape: tuple[int, ...]) -> str:
    kind = _kind(handle)
    if not (kind.is_floating() or kind.is_int()):
        return ""
    value = np.broadcast_to(handle.data, shape)[at]
    if kind.is_floating() and value.dtype.kind == "u":
        value = convert(np.array([value]), kind.name, "fp32").view(np.float32)[0] if kind.name in STORED_AS else value
    return str(value.item())


# ---------------------------------------------------------------------------------- a launch that is watched


class Watch:
    """Watches a kernel in Triton's interpreter, and numbers the steps (lines) where NaN come from.

    Each value has an array ``attr["nan"]``: for each NaN the number of its step, from 1; 0 for other elements.

    Args:
        access: The record of the launch.
        frames: Yields files and lines of the kernel and the functions that it has called, innermost first.
        memory: Describes what contains an address.
    """

    def __init__(
        self, access: Access, frames: Callable[[], Iterator[tuple[str, int]]], memory: Callable[[int], str]
    ) -> None:
        self._access, self._frames, self._memory = access, frames, memory
        self._steps: list[Step] = []
        self._stored: dict[int, str] = {}  # where the NaN of a step is stored first

    @property
    def first(self) -> Step | None:
        """The first step that produced a stored NaN, else the first that read it; None if no NaN was stored."""
        ranked = sorted(self._stored, key=lambda number: (not self._steps[number - 1].is_made, number))
        return replace(self._steps[ranked[0] - 1], stored_to=self._stored[ranked[0]]) if ranked else None

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield patches of Triton's interpreter that tag its values: (object, attribute, replacement)."""
        for name in dir(Builder):
            if name.startswith("create_"):
                yield Builder, name, self._watched(name, getattr(Builder, name))
        yield functions, "applied", self._applied(functions.applied)
        reducing = interpreter.ReduceScanOpInterface
        yield reducing, "apply", self._reduced(reducing.apply)

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(builder: Builder, *args: Any, **options: Any) -> Any:
            result = original(builder, *args, **options)
            if name in STORES:
                self._stores(*(args[at] for at in STORES[name]))
            if name in MOVES:
                self._move(result, lambda moved: original(builder, *moved, **options), args, MOVES[name])
            for each in result if isinstance(result, tuple) else (result,):
                # a constant gets no number before a line chooses it, or computes with it
                if isinstance(each, Handle) and "nan" not in each.attr and name not in MOVES:
                    self._follow(name, each, args)
            return result

        return call

    def _applied(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *handles: Handle) -> Handle:
            result = original(function, *handles)
            self._follow("libdevice", result, handles)
            return result

        return call

    def _reduced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(reduction: Any, given: Any) -> Any:
            results = original(reduction, given)
            operands = [each.handle for each in (given if isinstance(given, tuple) else (given,))]
            for result in results if isinstance(results, tuple) else (results,):
                if "nan" not in result.handle.attr:
                    self._reduce(result.handle, operands, reduction)
            return results

        return call

    # what becomes of the numbers

    def _follow(self, name: str, result: Handle, args: Sequence[Any]) -> None:
        """Give each NaN of an operator's result the step number of an operand's NaN; a new NaN gets a new step."""
        operands = [each for each in args if isinstance(each, Handle)]
        if name in LOADS:
            return self._load(result, *(args[at] for at in ((0, 1, 2) if name == "create_masked_load" else (1, 3, 2))))
        shape, is_whole = result.data.shape, name in WHOLE
        if name == "create_select":
            numbers = np.where(operands[0].data, *(self._numbers(each, shape) for each in operands[1:]))
            condition = self._numbers(operands[0], shape)
            numbers = np.where(numbers == 0, condition, numbers)
        else:
            given = [each for each in operands if "nan" in each.attr]
            numbers = self._first([_of_programs(each, shape) if is_whole else self._numbers(each, shape)
                                   for each in given], shape)  # fmt: skip
        made = nans(result)
        is_read = name == "create_bitcast" and not _kind(operands[0]).is_floating()
        said = " and ".join(_infinities(operands)) if is_whole else operands
        self._keep(result, numbers, made, said, is_made=not is_read)
        return None

    def _keep(
        self, result: Handle, numbers: np.ndarray, made: np.ndarray | None, operands: Any, *, is_made: bool = True
    ) -> None:
        """Tag a result with step numbers by element; ``made`` is the mask of its NaN.

        A NaN without a number gets a new step, described by ``operands`` and ``is_made``.
        """
        if made is None:
            if numbers.any():
                result.attr["nan"] = numbers
            return
        if not made.any():
            return
        numbers = np.where(made, numbers, 0)
        new = made & (numbers == 0)
        if new.any():
            at = tuple(np.argwhere(new)[0].tolist())
            words = operands if isinstance(operands, str) else " and ".join(
                filter(None, (_shown(each, at, result.data.shape) for each in operands))
            )  # fmt: skip
            read_from = "" if is_made else "bits of one"
            numbers[new] = self._step(is_made=is_made, operands=words, read_from=read_from)
        result.attr["nan"] = numbers

    def _move(self, result: Any, again: Callable[[list[Any]], Any], args: Sequence[Any], at: Sequence[int]) -> None:
        if not any("nan" in args[place].attr for place in at):
            return
        moved = list(args)
        for place in at:
            moved[place] = Handle(self._numbers(args[place], args[place].data.shape), tl.int32)
        found = again(moved)
        pairs = zip(result, found, strict=True) if isinstance(result, tuple) else ((result, found),)
        for each, numbers in pairs:
            each.attr["nan"] = numbers.data

    def _reduce(self, result: Handle, operands: Sequence[Handle], reduction: Any) -> None:
        whole = np.broadcast_shapes(*(each.data.shape for each in operands))
        numbers, axis = along(reduction.axis, self._first([self._numbers(each, whole) for each in operands], whole))
        first = np.where(numbers == 0, NONE, numbers).min(axis, keepdims=True)
        first = np.where(first == NONE, 0, first).astype(np.int32)
        shape = result.data.shape
        if isinstance(reduction, interpreter.ScanOps):
            first = np.broadcast_to(first, numbers.shape).reshape(whole)
        else:
            first = np.broadcast_to(first.reshape(len(first), *shape[1:]), shape)
        values, axis = along(reduction.axis, operands[0].data)
        odd = np.unique(values[~np.isfinite(values)]).tolist() if values.dtype.kind == "f" else []
        self._keep(result, first, nans(result), f"a row with {' and '.join(map(str, odd))}" if odd else "a row")

    def _load(self, result: Handle, pointers: Handle, mask: Any, other: Any) -> None:
        found = nans(result)
        if found is None or not found.any():
            return
        shape = result.data.shape
        is_read = found & (True if mask is None else np.broadcast_to(mask.data, shape).astype(bool))
        numbers = np.zeros(shape, np.int32) if other is None else self._numbers(other, shape).copy()
        if is_read.any():
            at = tuple(np.argwhere(is_read)[0].tolist())
            address = int(np.broadcast_to(pointers.data, shape)[at])
            memory = f"from {self._element(address, pointers)}, {self._memory(address)}"
            numbers[is_read] = self._step(is_made=False, read_from=memory)
        self._keep(result, numbers, found, "the load's other")

    def _stores(self, pointers: Handle, value: Handle, mask: Any) -> None:
        which = is_code(value)
        which = nans(value) if which is None else which
        if which is None:
            return
        numbers = np.zeros((), np.int32) + value.attr.get("nan", 0)
        addresses, numbers, which = np.broadcast_arrays(pointers.data, numbers, which)
        which = which & (True if mask is None else np.broadcast_to(mask.data, which.shape).astype(bool))
        if nans(value) is not None and (constant := which & (numbers == 0)).any():
            numbers = np.where(constant, self._step(is_made=True, operands="a constant"), numbers)
        stored = numbers * which
        for number in np.unique(stored[stored > 0]).tolist():
            if number not in self._stored:
                at = tuple(np.argwhere(stored == number)[0].tolist())
                self._stored[number] = self._element(int(addresses[at]), pointers)

    # words and numbers

    def _element(self, address: int, pointers: Handle) -> str:
        name, offset = self._access.owner(address)
        return f"{name}, element {offset // max(1, pointers.get_element_ty().primitive_bitwidth // 8)}"

    def _numbers(self, handle: Handle, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(handle.attr.get("nan", np.int32(0)), shape)

    def _first(self, numbers: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(shape, np.int32)
        for each in numbers:
            found = np.where((found == 0) | ((each > 0) & (each < found)), each, found)
        return found

    def _step(self, *, is_made: bool, operands: str = "", read_from: str = "") -> int:
        frames = list(self._frames())
        path, line = next((each for each in frames if not any(library in each[0] for library in LIBRARIES)), frames[0])
        place = f"{path.rpartition('/')[2]}:{line}"
        self._steps.append(Step(is_made, place, linecache.getline(path, line).strip(), operands, read_from))
        return len(self._steps)


def _infinities(operands: Sequence[Handle]) -> Iterator[str]:
    for name, each in zip(("left tile", "right tile", "sum"), operands, strict=False):
        if len(operands) == 3 and is_odd(each):
            yield f"an infinity in the {name}"


def _of_programs(handle: Handle, shape: tuple[int, ...]) -> np.ndarray:
    numbers = handle.attr["nan"].reshape(len(handle.data), -1)
    first = np.where(numbers == 0, NONE, numbers).min(1)
    first = np.where(first == NONE, 0, first).astype(np.int32)
    return np.broadcast_to(first.reshape(-1, *(1,) * (len(shape) - 1)), shape)
