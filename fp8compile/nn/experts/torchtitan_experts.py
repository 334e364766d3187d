"""Experts that multiply in a method ``_grouped_mm(self, *, A, B_t, offs)``, as torchtitan's do."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fp8compile.nn.experts.module_spec import ModuleSpec, stacks
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.grouped_linear import grouped_mm

__all__ = ["METHOD"]

NAME, ARGUMENTS = "_grouped_mm", ("A", "B_t", "offs")


def _has_the_method(cls: type[nn.Module]) -> bool:
    method = inspect.getattr_static(cls, NAME, None)
    if not inspect.isfunction(method):
        return False
    _, *given = inspect.signature(method).parameters.values()
    return tuple(each.name for each in given) == ARGUMENTS and all(each.kind == each.KEYWORD_ONLY for each in given)


def _names(module: nn.Module) -> dict[tuple[int, ...], str]:
    found: dict[tuple[int, ...], list[str]] = {}
    for name, stack in stacks(module).items():
        found.setdefault(tuple(stack.shape[1:]), []).append(name)
    return {shape: "+".join(names) for shape, names in found.items()}


def _grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    self.check_gathered_as_codes(B_t)
    note_forward_dtype(self, next(iter(self._parameters)))
    observer = None
    if self._observers is not None:
        names = _names(self)
        name = names[tuple(B_t.shape[:-3:-1])]
        observer = self.observer(name, getattr(self, name.split("+")[0]))
    return grouped_mm(A, B_t, offs=offs, recipe=self.recipe, observer=observer)


METHOD = ModuleSpec(
    takes=_has_the_method,
    method=NAME,
    replacement=_grouped_mm,
    is_transposed=lambda module: False,
    observed=lambda module: list(_names(module).values()),
)
