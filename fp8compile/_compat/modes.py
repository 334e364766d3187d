"""Private interfaces of PyTorch's dispatch modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8compile._compat.imports import when_imported

__all__ = ["OnlookingMode", "is_in_mode"]


def is_in_mode() -> bool:
    """Whether a dispatch mode is active, such as the tracer of `make_fx`."""
    return torch._C._len_torch_dispatch_stack() > 0


class OnlookingMode(TorchDispatchMode):
    """Dispatch mode that sees every operator and does not stop Dynamo from compiling.

    A plain mode disables compilation while active, and imports Dynamo at its first operator, which takes seconds.
    """

    # code that was compiled with checkpointing draws random numbers in one, run_and_save_rng_state
    supports_higher_order_operators = True

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle one call of an operator; an override runs ``func(*args, **kwargs)`` and returns the result."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `_leave_untraced` makes Dynamo skip the mode

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that Dynamo ignores this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.look(func, args, kwargs or {})


def _leave_untraced() -> None:
    OnlookingMode.__torch_dispatch__ = torch._disable_dynamo(OnlookingMode.__torch_dispatch__, recursive=True)


when_imported("torch._dynamo", _leave_untraced)
