"""Finds the module in whose call a node of a graph was traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from fp8compile._compat import module_path
from fp8compile.nn.report.conversion_report import conversion_report

__all__ = ["Names", "layer_of_stack", "module_of_stack"]


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a model's modules.

    Attributes:
        layers: Names of all linears in `conversion_report`.
        modules: Maps each path of a module to the module's first path; shared modules have several paths.
    """

    layers: Sequence[str]
    modules: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """Collect the names of a model's modules."""
        first = {id(module): name for name, module in model.named_modules()}
        paths = {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        return Names(layers=[row.fqn for row in conversion_report(model).rows], modules=paths)


def _module(path: str, modules: Mapping[str, str]) -> str | None:
    """Return the name of the module that a path in a node's module stack refers to; None if none or ambiguous.

    The path may begin with a function's variable, or lack its beginning after a graph break.
    """
    if path in modules:
        return modules[path]
    inside = [name for name in modules if name and path.endswith(f".{name}")]
    if inside:
        return modules[max(inside, key=len)]
    ending = {first for name, first in modules.items() if path and name.endswith(f".{path}")}
    return ending.pop() if len(ending) == 1 else None


def module_of_stack(node: fx.Node, names: Names) -> str | None:
    """Name of the innermost module in whose call a node was traced; None if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    found = (_module(module_path(text), names.modules) for text, _ in reversed(list(stack.values())))
    return next((module for module in found if module is not None), None)


def layer_of_stack(node: fx.Node, names: Names) -> str | None:
    """Name of the layer in whose call a node was traced; None if the innermost module is no layer."""
    module = module_of_stack(node, names)
    return module if module in names.layers else None
