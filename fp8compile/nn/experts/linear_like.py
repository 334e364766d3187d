"""Linear layers that are not a ``nn.Linear``: a class with ``weight``, possibly transposed, and ``bias``.

The Conv1D of transformers, which GPT-2 uses, is known. Other classes can be registered: see ``fp8compile.library``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.experts.host import Host, Layout, code_of
from fp8compile.nn.functional import linear

__all__ = ["CONV1D", "linear_host"]

FORWARD = ("transformers.pytorch_utils", "Conv1D.forward")


def linear_host(takes: Callable[[type[nn.Module]], bool], *, is_transposed: bool) -> Host:
    """Make a `Host` for classes whose forward is ``x @ weight.T + bias``, or if transposed ``x @ weight + bias``.

    Args:
        takes: Returns whether a class has such a forward.
        is_transposed: Whether ``weight`` is (in_features, out_features).
    """

    def layout(module: nn.Module) -> Layout:
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"convert: {type(module).__name__} is registered as a linear by another name, and has no weight, the "
                "parameter that such a module multiplies by."
            )
        size = tuple(weight.shape) if not is_lazy(weight) and weight.ndim == 2 else (0, 0)
        n, k = size[::-1] if is_transposed else size
        own: dict[str, Any] = {"weight": weight}
        return Layout(weights=own, matrices=((n, k),))

    return Host(
        takes=takes,
        method="forward",
        replacement=_transposed_forward if is_transposed else _forward,
        is_transposed=lambda module: is_transposed,
        layout=layout,
        is_linear=True,
    )


def _forward(self: Any, x: Tensor) -> Tensor:
    """Compute ``x @ weight.T + bias`` with the layer's recipe; the result has the dtype of x."""
    return linear(x, self.weight, getattr(self, "bias", None), recipe=self.recipe)


def _transposed_forward(self: Any, x: Tensor) -> Tensor:
    """Compute ``x @ weight + bias`` with the layer's recipe, for a weight that is kept as (in_features, out_features).

    The result has the dtype of x.
    """
    return linear(x, self.weight.t(), getattr(self, "bias", None), recipe=self.recipe)


CONV1D = linear_host(lambda cls: code_of(cls) == FORWARD, is_transposed=True)
