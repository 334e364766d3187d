"""Host: how a library writes a module that multiplies, such as experts or a linear by another name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Host", "Layout", "code_of", "inherits", "stacks"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a module multiplies by.

    Attributes:
        weights: The parameters that hold the matrices, by their names in the module; ``"mlp.w1"`` is a child's.
        matrices: (out_features, in_features) of each matrix that a row is multiplied by.
        num_experts: How many experts there are; 0 for a module that is one linear.
    """

    weights: Mapping[str, nn.Parameter]
    matrices: tuple[tuple[int, int], ...]
    num_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Host:
    """A way to write a module that multiplies by parameters of its own.

    Attributes:
        takes: Returns whether a class is written in this way. It looks at the class only, and imports nothing.
        method: The name of the method that multiplies.
        replacement: That method in FP8. It finds the recipe in ``self.recipe``.
        is_transposed: Whether a module keeps its matrices as (in_features, out_features).
        layout: Returns what a module multiplies by, if that is not its own 3-D parameters.
        is_linear: Whether it is one linear layer by another name, and not experts.
    """

    takes: Callable[[type[nn.Module]], bool]
    method: str
    replacement: Callable[..., Any]
    is_transposed: Callable[[nn.Module], bool]
    layout: Callable[[nn.Module], Layout] | None = None
    is_linear: bool = False


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are stacks of matrices, by name; the original of a parametrized one."""
    own = dict(module.named_parameters(recurse=False))
    for name, computed in getattr(module, "parametrizations", {}).items():
        own.update((name, original) for original in computed.parameters(recurse=False))
    return {name: each for name, each in own.items() if not is_lazy(each) and each.ndim == 3}


def code_of(cls: type[nn.Module]) -> tuple[str, str]:
    """The module and the qualified name of the function that is the forward of a class, under any decorator."""
    code = getattr(cls.forward, "__code__", None)
    names = getattr(cls.forward, "__globals__", {})
    return names.get("__name__", ""), getattr(code, "co_qualname", "")


def inherits(cls: type[nn.Module], base: type[nn.Module], method: str) -> bool:
    """Whether a class is another one, or inherited this method from it."""
    return issubclass(cls, base) and getattr(cls, method, None) is getattr(base, method)
