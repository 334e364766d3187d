"""Routers: what scores the experts for each token. They stay in high precision, as they cost next to nothing.

No class says that it is a router. It stands beside its experts, or beside the module that they are a part of, and all
its matrices have as many rows as there are experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.experts.hosts import is_experts, num_experts

__all__ = ["routers"]


def _scores(module: nn.Module, count: int) -> bool:
    weights = [each for each in module.parameters() if not is_lazy(each) and each.ndim > 1]
    return bool(weights) and all(each.ndim == 2 and each.shape[0] == count for each in weights)


def _around(module: nn.Module) -> Iterator[nn.Module]:
    """Experts among the children of a module, and among theirs."""
    for child in module.children():
        yield from (each for each in (child, *child.children()) if is_experts(each))


def routers(model: nn.Module) -> set[nn.Module]:
    """The routers of a model's experts, and all modules in them."""
    found: set[nn.Module] = set()
    for parent in model.modules():
        counts = {num_experts(experts) for experts in _around(parent)}
        if counts:
            beside = [child for child in parent.children() if any(_scores(child, count) for count in counts)]
            found.update(part for child in beside for part in child.modules())
    return found
