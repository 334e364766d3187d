"""Checks of a launch's memory accesses: they stay inside of its tensors, and programs do not race.

A GPU runs the programs of a launch in any order, some at the same time. If one program writes to an address that
another one reads or writes, the result depends on chance, unless all of them use atomic operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Access", "poisoned"]


def poisoned(size: Any, stride: Any, dtype: torch.dtype, byte: int) -> Tensor:
    """Allocate a tensor whose memory is filled with one byte, so that reads of unwritten memory show.

    The byte 255 gives NaN in every float format.
    """
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    if tensor.untyped_storage().nbytes():
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(byte)
    return tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    end = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + end


@dataclass(frozen=True, eq=False)
class Accessed:
    """The elements of one load, store or atomic that a batch of programs made, one entry for each element.

    Attributes:
        programs: Number of the program that accessed the element.
        addresses: Address of the element.
        place: File and line of the load, store or atomic.
    """

    programs: np.ndarray
    addresses: np.ndarray
    place: str


@dataclass
class Access:
    """The record of one launch: its tensors, and the memory that each of its programs accessed.

    Attributes:
        name: Name of the kernel.
        spans: First address and end address of each tensor, by the argument's name.
        programs: Numbers of the programs that run, (P,) int64.
    """

    name: str
    spans: dict[str, tuple[int, int]]
    programs: np.ndarray = field(default_factory=lambda: np.array([-1]))
    _accessed: dict[str, list[Accessed]] = field(default_factory=lambda: {"load": [], "store": [], "atomic": []})

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> Access:
        """Create the empty record of a launch with these arguments."""
        tensors = {each: getattr(value, "base", value) for each, value in arguments.items()}  # of a TMA descriptor
        return cls(name, {each: _span(value) for each, value in tensors.items() if isinstance(value, Tensor)})

    def record(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int, place: str) -> None:
        """Record an access before it is made.

        Args:
            kind: "load", "store" or "atomic".
            pointers: Addresses of the elements; dim 0 is that of programs, of size 1 if all of them load the same.
            mask: True for each element that is accessed, of the same shape.
            width: Bytes of each element.
            place: File and line of the access.

        Raises:
            IndexError: An address is outside of the launch's tensors.
        """
        owners = self.programs if len(pointers) > 1 else self.programs[:1]
        addresses, programs = pointers[mask], np.repeat(owners, np.count_nonzero(mask.reshape(len(mask), -1), axis=1))
        inside = np.zeros(addresses.shape, bool)
        for start, end in self.spans.values():
            inside |= (addresses >= start) & (addresses + np.uint64(width) <= end)
        if not inside.all():
            program = programs[np.argmin(inside)]
            own = inside[programs == program]
            raise IndexError(
                f"{self.name}: program {program} would {kind} {int((~own).sum())} of {len(own)} elements "
                f"outside of the kernel's tensors ({', '.join(self.spans)}). On a GPU this is another tensor's "
                f"memory. The access is at {place}."
            )
        if len(owners) < len(self.programs):  # all programs load the same
            addresses, programs = np.tile(addresses, len(self.programs)), np.repeat(self.programs, len(addresses))
        self._accessed[kind].append(Accessed(programs, addresses, place))

    def mark(self) -> dict[str, int]:
        """The number of records so far, for `forget`."""
        return {kind: len(records) for kind, records in self._accessed.items()}

    def forget(self, marked: dict[str, int]) -> None:
        """Drop all records since `mark` was called."""
        for kind, count in marked.items():
            del self._accessed[kind][count:]

    def owner(self, address: int) -> tuple[str, int]:
        """The argument that an address belongs to, and the address's offset from the argument's first byte."""
        return next((name, address - start) for name, (start, end) in self.spans.items() if start <= address < end)

    def _argument(self, address: int) -> str:
        name, offset = self.owner(address)
        return f"{name} + {offset} bytes"

    def assert_no_race(self) -> None:
        """Check for races, after all programs ran.

        Raises:
            RuntimeError: The result depends on the order of the programs.
        """
        plain, atomic = _sorted(self._accessed["store"]), _sorted(self._accessed["atomic"])
        loaded = _flat(self._accessed["load"])
        for what, kinds, first, second in (
            ("written by two programs", ("store",), plain, plain),
            ("written by one program and read by another", ("store", "load"), plain, loaded),
            ("written by one program and changed by an atomic of another", ("store", "atomic"), plain, atomic),
            ("changed by an atomic of one program and read by another", ("atomic", "load"), atomic, loaded),
        ):
            raced = _shared(*first, *second)
            if len(raced):
                places = " and ".join(dict.fromkeys(place for kind in kinds for place in self._places(kind, raced[0])))
                raise RuntimeError(
                    f"{self.name}: {len(raced)} addresses are {what}, the first at {self._argument(int(raced[0]))}, "
                    f"at {places}. Programs of a launch run in any order: the result depends on chance."
                )

    def _places(self, kind: str, address: np.uint64) -> list[str]:
        """Files and lines of the accesses to an address."""
        return [each.place for each in self._accessed[kind] if (each.addresses == address).any()]


def _flat(parts: list[Accessed]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses, and the program that accessed each of them."""
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return np.concatenate([each.addresses for each in parts]), np.concatenate([each.programs for each in parts])


def _sorted(parts: list[Accessed]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of an address and a program, sorted and without repeats."""
    addresses, programs = _flat(parts)
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    is_new = np.ones(len(addresses), bool)
    is_new[1:] = (addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1])
    return addresses[is_new], programs[is_new]


def _shared(first: np.ndarray, by_first: np.ndarray, second: np.ndarray, by_second: np.ndarray) -> np.ndarray:
    """Addresses in both ``first``, sorted, and ``second`` that different programs access."""
    if not len(first) or not len(second):
        return first[:0]
    lowest = np.searchsorted(first, second, side="left")
    highest = np.searchsorted(first, second, side="right")
    found = highest > lowest
    # several programs in `first`, or a single one that differs from the one in `second`
    other = found & ((highest - lowest > 1) | (by_first[np.minimum(lowest, len(first) - 1)] != by_second))
    return np.unique(second[other])
