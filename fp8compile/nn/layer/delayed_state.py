"""DelayedState: the amax histories and multipliers (1 / scale) of a layer with delayed scaling."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile._compat import replicated
from fp8compile.ops.layer.delayed_scaling_state import ROW_OF_WEIGHT
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.tensor.check_arguments import group_name, shown

__all__ = ["DelayedState", "RowOfWeight", "check_amax_group", "check_state"]


class DelayedState(NamedTuple):
    """Amax histories and multipliers (1 / scale) of a layer with delayed scaling.

    Each tensor has one row for input, one for weight and one for grad_output.

    Attributes:
        amax_history: Shape (3, history), float32: the amaxes of the last steps, in the order of ``DelayedScaling``.
        multiplier: Shape (3,), float32: the factors applied before the cast in the next step.
        group: Name of the process group over which amaxes are reduced; None for no reduction.
    """

    amax_history: Tensor
    multiplier: Tensor
    group: str | None = None

    @classmethod
    def initial(
        cls, recipe: Recipe, *, device: torch.device | str | None = None, group: ProcessGroup | None = None
    ) -> Self:
        """Create the initial state: amaxes of 0 and multipliers of 1.

        Args:
            recipe: A recipe with delayed scaling.
            device: Device of the layer.
            group: The ranks over which amaxes are reduced. All these ranks must run the same backward passes.

        Raises:
            ValueError: The recipe has no delayed scaling.
            TypeError: ``group`` is not a process group.
        """
        if not recipe.history():
            raise ValueError(
                "DelayedState: the recipe contains no DelayedScaling, so there is no state. Use a recipe such as "
                "fp8compile.recipes.delayed(), or omit the state."
            )
        rows = len(TENSORS)
        history = torch.zeros(rows, recipe.history(), dtype=torch.float32, device=device)
        return cls(history, torch.ones(rows, dtype=torch.float32, device=device), group_name("DelayedState", group))

    def reset(self) -> None:
        """Reset in place to the initial state, except for the amax of a quantized weight."""
        with torch.no_grad():
            self.amax_history[:, 1:].zero_()  # entry 0 is kept: a quantized weight's amax, else 0
            self.multiplier.fill_(1.0)


class RowOfWeight:
    """Callable that returns the amax history and multiplier of a layer's weight, without keeping the layer alive."""

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    def __call__(self) -> tuple[Tensor, Tensor] | None:
        """Return views of the layer's buffers: amax history (history,), multiplier (); None if the layer is gone."""
        if (layer := self._layer()) is None:
            return None
        history, multiplier, _ = layer.delayed_state()
        return replicated(history)[ROW_OF_WEIGHT], replicated(multiplier)[ROW_OF_WEIGHT]


def check_state(state: object) -> None:
    """Raise a TypeError unless ``state`` is a DelayedState, a ValueError if one of its tensors requires grad.

    The op checks later whether the state fits the recipe.
    """
    if not isinstance(state, DelayedState):
        raise TypeError(f"linear: `state` is {shown(state)}; it must be a fp8compile.DelayedState, or None.")
    if state.amax_history.requires_grad or state.multiplier.requires_grad:
        raise ValueError(
            "linear: a tensor of `state` requires grad, but the state is not trained. Call .detach() on it."
        )


def check_amax_group(
    function: str, recipes: Iterable[Recipe], amax_group: object, *, none_has: str = "the recipe has no"
) -> None:
    """Raise a ValueError that names ``function`` if an amax group is given and no recipe has delayed scaling.

    Raise a TypeError if the group is no ProcessGroup. ``none_has`` is the error's text before "delayed scaling".
    """
    group_name(function, amax_group)
    if amax_group is not None and not any(recipe.history() for recipe in recipes):
        raise ValueError(
            f"{function}: `amax_group` was passed, but {none_has} delayed scaling. Omit amax_group: with current "
            "scaling, each rank computes the scale of its own tensor."
        )
