"""Run the wrappers that Inductor generates on tensors without memory, and record allocations.

Kernels are left out. A tensor lives as long as something refers to it, as in a real run, so that `del`, reused memory,
views and cleared arguments need no rules.

    run        held by its caller               freed once the run has read it        returned
    forward    parameters, their codes, inputs  nothing                               results, kept tensors
    backward   the same, forward's results      kept tensors, gradients of results    gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile.testing.gpu.graphs import GpuGraph
from fp8compile.testing.gpu.loaded import LoadedWrapper, StandIns
from fp8compile.testing.gpu.lowering import empty_on
from fp8compile.testing.memory.timeline import OWNERS, Moment, Timeline

__all__ = ["Run", "Wrapper", "run_wrappers"]

META = torch.device("meta")


class Wrapper(Protocol):
    """Protocol of an object, such as a `Schedule`, with the Python file that Inductor generated for a graph."""

    @property
    def source(self) -> str:
        """Text of the generated Python file."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """Objects that the source refers to by name without defining them."""


@dataclass(frozen=True)
class Run:
    """Allocations and deallocations of a forward and its backward.

    Attributes:
        forward: Timeline of the forward.
        backward: Timeline of the backward.
    """

    forward: Timeline
    backward: Timeline


class _Nothing:
    """Stub for kernels and their compiler that accepts any attribute and any call."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self


class _Products:
    """Stub for ``extern_kernels``: calls with ``out=`` do nothing; others run, to allocate a result."""

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        product = getattr(extern_kernels, name)
        return lambda *args, **kwargs: None if kwargs.get("out") is not None else product(*args, **kwargs)


class _Ledger:
    """Records each new storage, its owner (a category such as "kept"), and when the storage is freed."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sizes: list[int] = []
        self._changes: list[tuple[int, int]] = []  # number of the storage, bytes more
        self._owners: dict[int, str] = {}

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage in the order of first use; records a new storage."""
        self._sweep()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = StorageWeakRef(storage), len(self._sizes)
            self._changes.append((len(self._sizes), storage.nbytes()))
            self._sizes.append(storage.nbytes())
        return self._alive[storage._cdata][1]

    def give(self, owner: str, tensors: Iterable[Any]) -> None:
        """Set the owner of each tensor's storage, unless it has one; ``owner`` names a field of `Moment`."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._owners.setdefault(self.number(tensor), owner)

    def _sweep(self) -> None:
        gone = [key for key, (storage, _) in self._alive.items() if storage.expired()]
        for key in gone:
            _, number = self._alive.pop(key)
            self._changes.append((number, -self._sizes[number]))

    def mark(self) -> int:
        """Number of allocations and deallocations so far, an argument of `timeline`."""
        self._sweep()
        return len(self._changes)

    def timeline(self, start: int, end: int) -> Timeline:
        """What was held at ``start``, and the changes until ``end``; `mark` returns such positions."""
        changes = [(self._owners.get(number, "temporaries"), size) for number, size in self._changes]
        held = dict.fromkeys(OWNERS, 0)
        for owner, size in changes[:start]:
            held[owner] += size
        return Timeline(Moment(**held), tuple(changes[start:end]))


class _Noting(TorchDispatchMode):
    """Dispatch mode that runs operators on the meta device, and records their results' storages."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: META, (args, kwargs or {}))
        result = op(*args, **kwargs)
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                self._ledger.number(each)
        return result


class _Caller:
    """Calls generated code with stand-ins for its device, and records its allocations in a ledger."""

    def __init__(self, ledger: _Ledger, device: str) -> None:
        self._ledger, self._device = ledger, device

    def __call__(self, wrapper: Wrapper, args: list[Any]) -> list[Any]:
        constants = {name: empty_on(META, value) for name, value in wrapper.constants.items()}
        with _strides_unchecked():
            stand_ins = StandIns(_Nothing(), _Products(), self._allocate, self._device)
            call = LoadedWrapper(wrapper.source, constants, stand_ins)
            with _Noting(self._ledger):
                return call(args)

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=META)
        self._ledger.number(tensor)
        return tensor


@contextmanager
def _strides_unchecked() -> Iterator[None]:
    """Context in which wrappers accept arguments of any strides, such as padded saved tensors."""
    from unittest import mock

    guards = torch._C._dynamo.guards
    with mock.patch.multiple(guards, assert_size_stride=_Nothing(), assert_alignment=_Nothing(), create=True):
        yield


def run_wrappers(graphs: Sequence[GpuGraph], wrappers: Sequence[Wrapper], owners: Sequence[str], device: str) -> Run:
    """Run the generated code of a forward and its backward.

    Args:
        graphs: The forward graph, and the backward graph.
        wrappers: Their code.
        owners: For each argument of the forward, what it is: "parameters", "weight_codes" or "inputs".
        device: Type of the device that the code is for, "cuda" or "cpu".
    """
    forward, backward = graphs
    ledger = _Ledger()
    call = _Caller(ledger, device)
    given = [empty_on(META, value) for value in forward.inputs]  # the caller holds them to the end
    for owner in ("parameters", "weight_codes", "inputs"):
        ledger.give(owner, (each for each, own in zip(given, owners, strict=True) if own == owner))
    before = ledger.mark()
    outputs = call(wrappers[0], list(given))
    middle = ledger.mark()

    results = [outputs[at] for at in forward.returned]
    ledger.give("results", results)
    passed = _arguments(ledger, forward, backward, outputs)
    del outputs
    begin = ledger.mark()
    gradients = call(wrappers[1], passed)
    ledger.give("gradients", gradients)
    end = ledger.mark()
    return Run(ledger.timeline(before, middle), ledger.timeline(begin, end))


def _arguments(ledger: _Ledger, forward: GpuGraph, backward: GpuGraph, outputs: Sequence[Any]) -> list[Any]:
    """Match the forward's outputs to the backward's arguments by node name, and add output gradients.

    The arguments' storages are recorded in ``ledger`` as "kept" or "results".
    """
    (nodes,) = forward.graph.graph.find_nodes(op="output")[0].args
    saved = {getattr(node, "name", None): value for node, value in zip(nodes, outputs, strict=True)}
    found = []
    for place in backward.graph.graph.find_nodes(op="placeholder"):
        is_saved = place.name in saved
        found.append(saved[place.name] if is_saved else empty_on(META, place.meta["val"]))
        ledger.give("kept" if is_saved else "results", found[-1:])
    return found
