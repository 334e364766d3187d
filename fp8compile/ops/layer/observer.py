"""The hook through which layers are observed: what a layer calls, without knowing what is computed from it.

`fp8compile.monitor` registers the ops that observe, and hands its observers to modules.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fp8compile.quantizers import Recipe

__all__ = ["Observer"]


class Observer(Protocol):
    """Observes the operands of one weight's GEMMs; a module passes it to the functions that multiply."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe whose quantizers are observed; None for the layer's recipe."""

    def observe(self, y: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        """Observe one call of a layer; return its output.

        Args:
            y: The output.
            x: The input.
            weight: The weight.
            args: The arguments of `fp8compile.ops.layer.layer_args.LayerArgs`: offs, known, sizes, sharding, recipe.
        """

    def placed(self, first: int) -> Observer:
        """Return an observer for a rank whose first matrix has the index ``first``."""

    def note_call(self) -> None:
        """Note that the layer runs now, in eager mode."""
