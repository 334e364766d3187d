"""Raises if a kernel launch accesses memory outside of its tensors, or if its Triton programs race.

A GPU runs the programs of a launch in any order, some at the same time. If one program writes to an address that
another one reads or writes, the result depends on chance, unless both use atomic operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Access", "poisoned"]


def poisoned(size: Any, stride: Any, dtype: torch.dtype, byte: int) -> Tensor:
    """Allocate a tensor in memory filled with ``byte``, so that reads of unwritten memory are noticed.

    The byte 255 gives NaN in every float format that has NaN.
    """
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    if tensor.untyped_storage().nbytes():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(byte)
    return tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    end = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + end


@dataclass(frozen=True, eq=False)
class Accessed:
    """One load, store or atomic that a batch of Triton programs executed.

    Attributes:
        programs: Linear indices of the P Triton programs, (P,).
        pointers: Addresses of elements, (P, ...); (1, ...) if all programs access the same elements.
        mask: True for each element that is accessed, in the shape of ``pointers``.
        place: File and line of the load, store or atomic.
        span: The first address, and the address after the last one.
    """

    programs: np.ndarray
    pointers: np.ndarray
    mask: np.ndarray
    place: str
    span: tuple[int, int]

    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the byte address and the Triton program's index of each access to an element, as two arrays."""
        owners = self.programs if len(self.pointers) > 1 else self.programs[:1]
        counts = np.count_nonzero(self.mask.reshape(len(self.mask), -1), axis=1)
        addresses, programs = self.pointers[self.mask], np.repeat(owners, counts)
        if len(owners) < len(self.programs):  # all programs access the same
            return np.tile(addresses, len(self.programs)), np.repeat(self.programs, len(addresses))
        return addresses, programs


@dataclass
class Access:
    """The record of one launch: its tensors, and the memory that each of its Triton programs accessed.

    Attributes:
        name: Name of the kernel.
        spans: First address and end address of each tensor, by the argument's name.
        programs: Linear indices of the P programs of the batch that runs, (P,) int64.
    """

    name: str
    spans: dict[str, tuple[int, int]]
    programs: np.ndarray = field(default_factory=lambda: np.array([-1]))
    _accessed: dict[str, list[Accessed]] = field(default_factory=lambda: {"load": [], "store": [], "atomic": []})

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> Access:
        """Create the empty record of a launch of the kernel ``name`` with these arguments."""
        tensors = {each: getattr(value, "base", value) for each, value in arguments.items()}  # of a TMA descriptor
        return cls(name, {each: _span(value) for each, value in tensors.items() if isinstance(value, Tensor)})

    def record(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int, place: str) -> None:
        """Record an access before it is executed.

        Args:
            kind: "load", "store" or "atomic".
            pointers: Addresses of elements, (P, ...); (1, ...) if all P programs access the same elements.
            mask: True for each element that is accessed, in the shape of ``pointers``.
            width: Bytes of each element.
            place: File and line of the access.

        Raises:
            IndexError: An address is outside of the launch's tensors.
        """
        addresses = pointers if mask.all() else pointers[mask]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max()) + width
        accessed = Accessed(self.programs, pointers, mask, place, (low, high))
        if not any(start <= low and high <= end for start, end in self.spans.values()):
            self._check_inside(kind, accessed, width)
        self._accessed[kind].append(accessed)

    def _check_inside(self, kind: str, accessed: Accessed, width: int) -> None:
        """Raise an IndexError unless each element, of ``width`` bytes, is in one of the launch's tensors.

        ``kind`` is "load", "store" or "atomic", for the error.
        """
        addresses, programs = accessed.elements()
        inside = np.zeros(addresses.shape, bool)
        for start, end in self.spans.values():
            inside |= (addresses >= start) & (addresses + np.uint64(width) <= end)
        if inside.all():
            return
        program = programs[np.argmin(inside)]
        own = inside[programs == program]
        raise IndexError(
            f"{self.name}: program {program} would {kind} {int((~own).sum())} of {len(own)} elements "
            f"outside of the kernel's tensors ({', '.join(self.spans)}). On a GPU this is another tensor's "
            f"memory. The access is at {accessed.place}."
        )

    def mark(self) -> dict[str, int]:
        """Return the number of records so far by kind; `forget` takes it, to drop later records."""
        return {kind: len(records) for kind, records in self._accessed.items()}

    def forget(self, marked: dict[str, int]) -> None:
        """Drop all records made after the call of `mark` that returned ``marked``."""
        for kind, count in marked.items():
            del self._accessed[kind][count:]

    def owner(self, address: int) -> tuple[str, int]:
        """The argument that an address belongs to, and the address's offset from the argument's first byte."""
        return next((name, address - start) for name, (start, end) in self.spans.items() if start <= address < end)

    def _argument(self, address: int) -> str:
        name, offset = self.owner(address)
        return f"{name} + {offset} bytes"

    def assert_no_race(self) -> None:
        """Raise a RuntimeError if the result depends on the order of the launch's Triton programs.

        Call this after all of them ran.
        """
        stores, atomics, loads = (self._accessed[kind] for kind in ("store", "atomic", "load"))
        for what, kinds, first, second in (
            ("written by two programs", ("store",), stores, stores),
            ("written by one program and read by another", ("store", "load"), stores, loads),
            ("written by one program and changed by an atomic of another", ("store", "atomic"), stores, atomics),
            ("changed by an atomic of one program and read by another", ("atomic", "load"), atomics, loads),
        ):
            raced = _raced(first) if first is second else _shared(first, second)
            if len(raced):
                places = " and ".join(dict.fromkeys(place for kind in kinds for place in self._places(kind, raced[0])))
                raise RuntimeError(
                    f"{self.name}: {len(raced)} addresses are {what}, the first at {self._argument(int(raced[0]))}, "
                    f"at {places}. The programs of a launch run in any order, so this is a data race."
                )

    def _places(self, kind: str, address: np.uint64) -> list[str]:
        return [each.place for each in self._accessed[kind] if (each.elements()[0] == address).any()]


def _flat(parts: Sequence[Accessed]) -> tuple[np.ndarray, np.ndarray]:
    elements = [each.elements() for each in parts]
    return tuple(np.concatenate(each) for each in zip(*elements, strict=True))  # type: ignore[return-value]  # two


def _sorted(parts: Sequence[Accessed]) -> tuple[np.ndarray, np.ndarray]:
    addresses, programs = _flat(parts)
    order = np.argsort(addresses, kind="stable")  # which is fast for addresses that are in order by parts
    return addresses[order], programs[order]


def _raced(parts: Sequence[Accessed]) -> np.ndarray:
    if not parts:
        return np.zeros(0, np.uint64)
    addresses, programs = _sorted(parts)
    return np.unique(addresses[1:][(addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])])


def _near(parts: Sequence[Accessed], others: Sequence[Accessed]) -> list[Accessed]:
    low, high = (np.array([each.span[side] for each in others], np.int64) for side in (0, 1))
    return [each for each in parts if ((low < each.span[1]) & (high > each.span[0])).any()]


def _shared(parts: Sequence[Accessed], others: Sequence[Accessed]) -> np.ndarray:
    near = _near(others, parts)
    if not near:
        return np.zeros(0, np.uint64)
    parts = _near(parts, near)
    first, by_first = _sorted(parts)
    second, by_second = _flat(near)
    at = np.minimum(np.searchsorted(first, second), len(first) - 1)
    other = (by_first[at] != by_second) | np.isin(second, _raced(parts))  # several programs, or one that differs
    return np.unique(second[(first[at] == second) & other])
