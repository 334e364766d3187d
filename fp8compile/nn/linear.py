"""fp8compile.Linear: a torch.nn.Linear whose GEMMs run in FP8."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from fp8compile._compat import rebind_load_hooks
from fp8compile.nn.functional import check_recipe, linear
from fp8compile.quantizers import Recipe
from fp8compile.tensor import SOURCE_DTYPES, shown

__all__ = ["Linear", "cannot_revert"]


class Linear(nn.Linear):
    """A ``torch.nn.Linear`` whose GEMMs run in FP8.

    Parameters are plain ``nn.Parameter``, the state dict is that of ``nn.Linear``, and so is whatever else this module
    does not override: it is a ``nn.Linear`` to every tool that looks for one.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether there is a bias.
        recipe: Quantizers for the operands of the three GEMMs.
        device: Of the parameters.
        dtype: Of the parameters: bfloat16, float16 or float32.

    Raises:
        TypeError: The recipe is none, or the dtype another one.
    """

    recipe: Recipe

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_recipe("Linear", recipe)
        if dtype not in (None, *SOURCE_DTYPES):
            raise TypeError(f"Linear: dtype is {dtype}; FP8 layers take bfloat16, float16 and float32.")
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = recipe

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe) -> Self:
        """The same layer in FP8: same parameters (not copies), hooks and mode.

        Args:
            linear: A ``nn.Linear``, no subclass of it.
            recipe: Quantizers for the operands.

        Raises:
            TypeError: ``linear`` is no plain ``nn.Linear``, or the recipe none.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"Linear.from_linear: given a {type(linear).__name__}; it takes a torch.nn.Linear and no subclass, "
                "whose own forward it would lose."
            )
        if _bypasses_class(linear):
            raise TypeError(
                "Linear.from_linear: the layer's forward was replaced on the instance, by .compile() or a hook of "
                "another library, and would go on running instead of FP8. Convert before that."
            )
        check_recipe("Linear", recipe)
        module = cls.__new__(cls)
        module.__dict__.update(linear.__dict__)
        rebind_load_hooks(module)
        module.recipe = recipe
        return module

    def to_linear(self) -> nn.Linear:
        """The same layer as a ``torch.nn.Linear``: same parameters (not copies), hooks and mode.

        Raises:
            TypeError: This is a subclass or parametrized, or its forward was replaced or compiled on the instance.
        """
        if (reason := cannot_revert(self)) is not None:
            raise TypeError(f"Linear.to_linear: {reason}")
        module = nn.Linear.__new__(nn.Linear)
        module.__dict__.update(self.__dict__)
        del module.__dict__["recipe"]
        rebind_load_hooks(module)
        return module

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``; (..., in_features) to (..., out_features), in the dtype of the input."""
        return linear(input, self.weight, self.bias, recipe=self.recipe)

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            "Linear: torch.jit.script has no type for a recipe. Use torch.compile or torch.export, or script the "
            "model after fp8compile.revert."
        )

    def extra_repr(self) -> str:
        """What ``nn.Linear`` shows, and the recipe."""
        return f"{super().extra_repr()}, recipe={shown(self.recipe)}"


def _bypasses_class(layer: nn.Linear) -> bool:
    """Whether a call of the layer runs something kept on the instance, whatever its class becomes."""
    return "forward" in vars(layer) or layer._compiled_call_impl is not None


def cannot_revert(layer: Linear) -> str | None:
    """Why a layer can't become a ``nn.Linear`` again, or None."""
    if type(layer) is not Linear:
        return f"this is a {type(layer).__name__}, and its own forward or parametrization would be lost. Undo that."
    if _bypasses_class(layer):
        return "forward was replaced or compiled on the instance, and would go on in FP8. Undo that first."
    return None
