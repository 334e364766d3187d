"""Finds the module that was being called when a node of a graph was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from fp8compile._compat import module_path
from fp8compile.nn.conversion_report import conversion_report

__all__ = ["Names", "layer_of_stack", "module_of_stack"]


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a model's modules.

    Attributes:
        layers: Names of all linears in `conversion_report`.
        modules: Each path to a module, with the first path to the same module; shared modules have several paths.
    """

    layers: Sequence[str]
    modules: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """The names of a model's modules."""
        first = {id(module): name for name, module in model.named_modules()}
        paths = {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        return Names(layers=[row.fqn for row in conversion_report(model).rows], modules=paths)


def _module(path: str, modules: Mapping[str, str]) -> str | None:
    """The name of the module that a path leads to; None if there is none.

    The path may begin with a function's variable. It may also lack its beginning, because after a graph break the
    frames of inner modules are traced on their own. If several modules' paths end like it, the result is None.
    """
    if path in modules:
        return modules[path]
    inside = [name for name in modules if name and path.endswith(f".{name}")]
    if inside:
        return modules[max(inside, key=len)]
    ending = {first for name, first in modules.items() if path and name.endswith(f".{path}")}
    return ending.pop() if len(ending) == 1 else None


def module_of_stack(node: fx.Node, names: Names) -> str | None:
    """The innermost module that was being called when a node was traced; None if that isn't known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    found = (_module(module_path(text), names.modules) for text, _ in reversed(list(stack.values())))
    return next((module for module in found if module is not None), None)


def layer_of_stack(node: fx.Node, names: Names) -> str | None:
    """The layer that was being called when a node was traced; None if the innermost module is no layer."""
    module = module_of_stack(node, names)
    return module if module in names.layers else None
