"""Which modules are experts, and what matrices they have."""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.experts.dense import DENSE
from fp8compile.nn.experts.host import Host
from fp8compile.nn.experts.method import METHOD
from fp8compile.nn.experts.routed import ROUTED

__all__ = [
    "host_of",
    "is_experts",
    "is_transposed",
    "matrices_of_experts",
    "method_of_experts",
    "num_experts",
    "plain_class",
    "stacks",
]

HOSTS = (ROUTED, DENSE, METHOD)


@cache
def host_of(plain: type[nn.Module]) -> Host | None:
    """The library in whose way a class of experts is written; None if it is no class of experts."""
    return next((host for host in HOSTS if host.takes(plain)), None)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was before it was converted."""
    return getattr(type(module), "_plain_experts", type(module))


def is_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts, converted or not, that `convert` knows how to convert."""
    return host_of(plain_class(module)) is not None and bool(stacks(module))


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of experts that are stacks of matrices, by name; of a parametrized one, its original."""
    own = dict(module.named_parameters(recurse=False))
    for name, computed in getattr(module, "parametrizations", {}).items():
        own.update((name, original) for original in computed.parameters(recurse=False))
    return {name: each for name, each in own.items() if not is_lazy(each) and each.ndim == 3}


def is_transposed(module: nn.Module) -> bool:
    """Whether experts keep their matrices as (in_features, out_features)."""
    host = host_of(plain_class(module))
    return host is not None and host.is_transposed(module)


def num_experts(module: nn.Module) -> int:
    """How many experts a module of them has."""
    return next(iter(stacks(module).values())).shape[0]


def method_of_experts(module: nn.Module) -> str:
    """The name of the method of experts that multiplies."""
    host = host_of(plain_class(module))
    assert host is not None
    return host.method


def matrices_of_experts(module: nn.Module) -> list[tuple[int, int]]:
    """(out_features, in_features) of each matrix of one expert."""
    shapes = [tuple(each.shape[1:]) for each in stacks(module).values()]
    return [shape[::-1] for shape in shapes] if is_transposed(module) else shapes
