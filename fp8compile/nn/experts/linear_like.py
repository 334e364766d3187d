"""Linear layers that are not a ``nn.Linear``: transformers' Conv1D, and classes that users register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8compile.nn.experts.module_spec import Layout, ModuleSpec, code_of
from fp8compile.nn.layer.forward_dtype import note_forward_dtype
from fp8compile.nn.layer.functional import linear

__all__ = ["CONV1D", "linear_spec"]

FORWARD = ("transformers.pytorch_utils", "Conv1D.forward")


def linear_spec(takes: Callable[[type[nn.Module]], bool], *, is_transposed: bool) -> ModuleSpec:
    """Make a `ModuleSpec` for linear layers, ``x @ weight.T + bias``, of the classes that ``takes`` accepts.

    If ``is_transposed``, ``weight`` is (in_features, out_features), and the layers compute ``x @ weight + bias``.
    """

    def layout(module: nn.Module) -> Layout:
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"convert: {type(module).__name__} is registered as a linear layer of another library, but it has "
                "no parameter named weight."
            )
        size = tuple(weight.shape) if not is_lazy(weight) and weight.ndim == 2 else (0, 0)
        n, k = size[::-1] if is_transposed else size
        own: dict[str, Any] = {"weight": weight}
        return Layout(weights=own, matrices=((n, k),))

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight.t() if is_transposed else self.weight
        note_forward_dtype(self, "weight")
        observer = self.observer("weight")
        given: Any = {"weight_codes": self.step_codes("weight", is_turned=is_transposed), "observer": observer}
        return linear(x, weight, getattr(self, "bias", None), recipe=self.recipe, **given)

    return ModuleSpec(
        takes=takes,
        method="forward",
        replacement=forward,
        is_transposed=lambda module: is_transposed,
        layout=layout,
        is_linear=True,
    )


CONV1D = linear_spec(lambda cls: code_of(cls) == FORWARD, is_transposed=True)
