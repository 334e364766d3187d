"""Find the modules of a parameter by its memory, because views and gathered weights are new tensor objects."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from fp8compile._compat import local_itself
from fp8compile.nn.parameter_uses.flow import DATA, Value
from fp8compile.nn.parameter_uses.uses import Slot
from fp8compile.tensor import has_codes

__all__ = ["Owners", "memory_of", "tensors_in", "users_of_parameters"]


def users_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Return, for each parameter, the modules that hold it, in the order of ``model.modules()``."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, []).append(module)
    return users


def memory_of(tensor: Tensor) -> Hashable | None:
    """Return a key for the storage of a tensor, or of a DTensor's local tensor; None if it has no storage.

    The key does not keep the memory alive.
    """
    try:
        return StorageWeakRef(local_itself(tensor).untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse ones and the like
        return None


class Owners:
    """Finds the parameters of given modules that share memory with a tensor."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = list(modules)
        self.parts: dict[Hashable, dict[tuple[int, int], set[Slot]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look up the modules' parameters again, because FSDP makes new objects while a model runs."""
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and not is_lazy(parameter):
                    self._note(module, name, parameter)

    def _note(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        if (memory := memory_of(parameter)) is None:
            return
        own = local_itself(parameter)
        part: tuple[int, int] = (own.storage_offset(), own.storage_offset() + own.numel())
        slots = self.parts.setdefault(memory, {}).setdefault(part, set())
        if parameter.ndim > 1 and not has_codes(parameter):  # a QuantizedTensor handles its products itself
            slots.add((module, name))

    def of(self, memory: Hashable, tensor: Any) -> Value:
        """Return the (module, name) pairs of the parameter with the storage key ``memory``; None if there is none.

        If several parameters share the storage, the parameter at the offset of ``tensor`` is returned.
        """
        if memory not in self.parts and isinstance(tensor, nn.Parameter):
            self.refresh()
            self.parts.setdefault(memory, {})  # a parameter of another model
        parts = self.parts.get(memory)
        if parts is None:
            return DATA
        if len(parts) < 2:
            return frozenset().union(*parts.values())
        first = local_itself(tensor).storage_offset()  # several parameters in one piece of memory
        return frozenset().union(*(slots for (start, stop), slots in parts.items() if start <= first < stop))

    def sharing(self, slot: Slot) -> frozenset[Slot]:
        """Return all (module, name) pairs that hold the same parameter as ``slot``; more than one if it is tied."""
        groups = (slots for parts in self.parts.values() for slots in parts.values() if slot in slots)
        return frozenset().union(*groups)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among ``values``, and in lists or tuples among ``values``."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found
