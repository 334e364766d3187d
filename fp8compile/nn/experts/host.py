"""What is known of a library's way to write experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Host", "code_of"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A way to write a module of experts, whose parameters are stacks of matrices.

    Attributes:
        takes: Whether a class is written in this way. It looks at the class only, and imports nothing.
        method: The name of the method that multiplies.
        replacement: That method in FP8. It finds the recipe in ``self.recipe``.
        is_transposed: Whether a module keeps its matrices as (in_features, out_features).
    """

    takes: Callable[[type[nn.Module]], bool]
    method: str
    replacement: Callable[..., Any]
    is_transposed: Callable[[nn.Module], bool]


def code_of(cls: type[nn.Module]) -> tuple[str, str]:
    """The module and the qualified name of the function that is the forward of a class, under any decorator."""
    code = getattr(cls.forward, "__code__", None)
    names = getattr(cls.forward, "__globals__", {})
    return names.get("__name__", ""), getattr(code, "co_qualname", "")
