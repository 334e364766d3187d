"""Make the operators that a tensor subclass does not support raise an error that says why.

Without this, `Tensor`'s operators turn a TypeError into NotImplemented. Python then hides the error's text, and `==`
returns False.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from torch import Tensor

__all__ = ["refuse_operators"]

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
OPERATORS = [
    *(f"__{form}{name}__" for name, form in product(BINARY, ("", "r", "i"))),
    *(f"__{name}__" for name in ["eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"]),
]
METHODS = ["share_memory_", "apply_", "map_", "map2_"]  # a wrapper has no memory, and PyTorch would read address 0


def refuse_operators(cls: type[Tensor], no_meaning: Callable[[object, Any], str]) -> None:
    """Make the operators of ``cls``, such as ``+``, and the methods in `METHODS` raise a TypeError.

    ``no_meaning`` returns the error's text, given the name of the operator or method, and the tensor.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(self: Tensor, *others: Any) -> Any:
            raise TypeError(no_meaning(f"Tensor.{name}", self))

        return refuse

    for name in [*OPERATORS, *METHODS]:
        setattr(cls, name, refused(name))
    cls.__hash__ = Tensor.__hash__  # type: ignore[method-assign]
