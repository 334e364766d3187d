"""ModuleSpec: describes how a module of another library multiplies, such as experts or a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Layout", "ModuleSpec", "code_of", "inherits", "stacks"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The matrices of a module: which parameters hold them, and their shapes.

    Attributes:
        weights: The parameters that hold the matrices, by name; ``"mlp.w1"`` is the parameter of a child.
        matrices: (out_features, in_features) of each matrix that a row is multiplied with.
        num_experts: Number of experts; 0 for a single linear layer.
    """

    weights: Mapping[str, nn.Parameter]
    matrices: tuple[tuple[int, int], ...]
    num_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """Describes which classes of another library are converted, and how their modules multiply in FP8."""

    # Returns whether a class is of this kind. It looks at the class only, and imports nothing.
    takes: Callable[[type[nn.Module]], bool]
    method: str  # the name of the method that multiplies
    replacement: Callable[..., Any]  # The method in FP8. It finds the recipe in ``self.recipe``.
    # returns whether a module keeps its matrices as (in_features, out_features)
    is_transposed: Callable[[nn.Module], bool]
    # returns the matrices that a module multiplies by; None if they are its own 3-D parameters
    layout: Callable[[nn.Module], Layout] | None = None
    # returns the names that the method gives to `Observed.observer`; None if these are the names of the weights
    observed: Callable[[nn.Module], Sequence[str]] | None = None
    is_linear: bool = False  # whether the module is one linear layer, and not experts
    takes_additions: bool = False  # whether ``replacement`` calls `fp8compile.nn.experts.adapters.with_additions`


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own 3-D parameters (stacked weights of experts) by name; if parametrized, the originals."""
    own = dict(module.named_parameters(recurse=False))
    for name, computed in getattr(module, "parametrizations", {}).items():
        own.update((name, original) for original in computed.parameters(recurse=False))
    return {name: each for name, each in own.items() if not is_lazy(each) and each.ndim == 3}


def code_of(cls: type[nn.Module]) -> tuple[str, str]:
    """Return module and qualified name of the function behind ``cls.forward``, perhaps a decorator's wrapper."""
    code = getattr(cls.forward, "__code__", None)
    names = getattr(cls.forward, "__globals__", {})
    return names.get("__name__", ""), getattr(code, "co_qualname", "")


def inherits(cls: type[nn.Module], base: type[nn.Module], method: str) -> bool:
    """Whether ``cls`` is ``base``, or a subclass that inherits the method named ``method`` from ``base``."""
    return issubclass(cls, base) and getattr(cls, method, None) is getattr(base, method)
