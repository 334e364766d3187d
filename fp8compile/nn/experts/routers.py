"""Find routers, which score the experts for each token. Routers are small and stay in high precision.

A router is known by place and shape, not by class: it is a sibling of its experts, or of a module that contains the
experts, and all its matrices have as many rows as there are experts on all ranks together.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.experts.known_modules import is_experts, layout_of

__all__ = ["routers"]

LEVELS = 2  # number of modules above the experts to search; modules without other matrices do not count


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if not is_lazy(each) and each.ndim > 1]


def _counts(experts: nn.Module, beside: nn.Module) -> set[int]:
    """Return the numbers of scores that a router may give a token: one per expert of this rank, or of all ranks.

    For all ranks, ``num_experts`` of ``experts``, or of a module in the possible router ``beside``, gives the number.
    """
    own = layout_of(experts).num_experts
    said = {getattr(each, "num_experts", None) for each in (experts, *beside.modules())}
    return {own} | {count for count in said if type(count) is int and count % max(own, 1) == 0}


def _scores(module: nn.Module, experts: nn.Module) -> bool:
    weights = _matrices(module)
    rows = {each.shape[0] for each in weights}
    return all(each.ndim == 2 for each in weights) and len(rows) == 1 and rows <= _counts(experts, module)


def _beside(module: nn.Module, parent: nn.Module) -> list[nn.Module]:
    return [each for each in parent.children() if each is not module and _matrices(each)]


def _routers_of(experts: nn.Module, parents: dict[nn.Module, list[nn.Module]]) -> set[nn.Module]:
    """Return the routers beside ``experts``, or else beside the closest ancestor of ``experts`` that has any.

    ``parents`` has each module's parents. The search ends after `LEVELS` levels at which siblings have matrices.
    """
    below, level = {experts}, 0
    while below and level < LEVELS:
        above = [(module, parent) for module in below for parent in parents.get(module, ())]
        others = [other for module, parent in above for other in _beside(module, parent)]
        if found := {other for other in others if _scores(other, experts)}:
            return found
        level += bool(others)
        below = {parent for _, parent in above}
    return set()


def routers(model: nn.Module) -> set[nn.Module]:
    """Return the routers of a model's experts, and all modules inside these routers."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for parent in model.modules():
        for child in parent.children():
            parents.setdefault(child, []).append(parent)
    scoring = {each for module in model.modules() if is_experts(module) for each in _routers_of(module, parents)}
    return {part for each in scoring for part in each.modules()}
