"""Which module was being called when a node of a graph was traced."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from fp8compile.nn.report import conversion_report

__all__ = ["Names", "layer_of_stack"]

STEP = re.compile(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)")


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the modules of a model are called.

    Attributes:
        layers: All linears of `conversion_report`.
        modules: Of every path that leads to a module, the first path to it: a module may have several names.
    """

    layers: Sequence[str]
    modules: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> Names:
        """Those of a model."""
        first = {id(module): name for name, module in model.named_modules()}
        paths = {name: first[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        return Names(layers=[row.fqn for row in conversion_report(model).rows], modules=paths)


def _path(text: str) -> str:
    """``layers.0.gate`` of ``L['self']._modules['layers'][0].gate``: without what the outermost object was called."""
    rest = re.sub(r"^L\['\w+'\]", "", text)
    return ".".join(next(filter(None, match)) for match in STEP.findall(rest))


def _module(path: str, modules: Mapping[str, str]) -> str | None:
    """The module that a path leads to.

    A path may have a function's variable before it. And after a graph break the frames of inner modules are traced on
    their own, so it may lack its beginning; where two modules end alike, none is meant.
    """
    if path in modules:
        return modules[path]
    inside = [name for name in modules if name and path.endswith(f".{name}")]
    if inside:
        return modules[max(inside, key=len)]
    ending = {first for name, first in modules.items() if path and name.endswith(f".{path}")}
    return ending.pop() if len(ending) == 1 else None


def layer_of_stack(node: fx.Node, names: Names) -> str | None:
    """The layer that was being called when a node was traced: the innermost module, if it is one; else None."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for text, _ in reversed(list(stack.values())):
        module = _module(_path(text), names.modules)
        if module is not None:
            return module if module in names.layers else None
    return None
