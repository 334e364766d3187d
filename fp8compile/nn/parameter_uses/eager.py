"""Find out in eager mode, by a dispatch mode, what a forward does with parameters while it runs.

The mode only looks on: operators run unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fp8compile import _compat
from fp8compile.nn.parameter_uses.flow import DATA, Value, result_of
from fp8compile.nn.parameter_uses.owners import Owners, memory_of, tensors_in
from fp8compile.nn.parameter_uses.uses import Uses

__all__ = ["Watching"]

CALLS = nn.modules.module.__file__  # the file with the frames of __call__ and of hooks


def running_method() -> str:
    """Return the name of the innermost module method on the call stack, or ``"a function"``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_varnames[:1] == ("self",) and code.co_filename != CALLS:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return f"{type(owner).__name__}.{code.co_name}"
        frame = frame.f_back
    return "a function"


class Watching(_compat.OnlookingMode):
    """Dispatch mode that follows parameters through all operators in its context, and collects their uses.

    Attributes:
        uses: The uses that were seen.
        owners: Finds the watched modules' parameters by their memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.uses: Uses = Uses()
        self.owners: Owners = Owners(model.modules())
        self.forms: dict[Hashable, Value] = {}

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator ``func``, and record how it uses the parameters among its arguments."""
        result = func(*args, **kwargs)
        given = tensors_in([*args, *kwargs.values()])
        if given and not any(map(_compat.is_traced, given)):
            self._follow(func, given, result)
        return result

    def _value(self, tensor: Tensor) -> Value:
        memory = memory_of(tensor)
        if memory is None:
            return DATA
        return self.forms[memory] if memory in self.forms else self.owners.of(memory, tensor)

    def _follow(self, func: Any, given: list[Tensor], result: Any) -> None:
        operands = [self._value(tensor) for tensor in given]
        if all(each is DATA for each in operands):
            return
        value, met = result_of(func, operands)
        if any(met.values()):
            self.uses.note(met, running_method())
        if value is not DATA:
            for made in tensors_in([result]):
                if (memory := memory_of(made)) is not None and memory not in self.owners.parts:
                    self.forms[memory] = value
