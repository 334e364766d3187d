"""Experts that multiply in a method ``_grouped_mm(self, *, A, B_t, offs)``, as torchtitan's experts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fp8compile.nn.experts.host import Host, stacks
from fp8compile.nn.grouped import grouped_mm

__all__ = ["METHOD"]

NAME, ARGUMENTS = "_grouped_mm", ("A", "B_t", "offs")


def _has_the_method(cls: type[nn.Module]) -> bool:
    method = inspect.getattr_static(cls, NAME, None)
    if not inspect.isfunction(method):
        return False
    _, *given = inspect.signature(method).parameters.values()
    return tuple(each.name for each in given) == ARGUMENTS and all(each.kind == each.KEYWORD_ONLY for each in given)


def _grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    # the method isn't told which of the module's weights it multiplies by, so all of them are observed as one
    stack = getattr(self, next(iter(stacks(self))), None) if self._observers is not None else None
    return grouped_mm(A, B_t, offs=offs, recipe=self.recipe, observer=self.observer("experts", stack))


METHOD = Host(takes=_has_the_method, method=NAME, replacement=_grouped_mm, is_transposed=lambda module: False)
