"""Placements (which shard of each tensor is on this rank) of layers with delayed scaling.

Delayed           the layer's own backward updates the state of delayed scaling
DelayedOverFsdp   amaxes reach the state as gradients, see `fp8compile.ops.layer.fsdp_delayed_amaxes`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer.delayed_scaling_state import (
    amax_of,
    check_repeated_forward,
    check_state,
    keep_used,
    kept_amax,
    update_state,
)
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.placements import Placement, RowsOverFsdpBase
from fp8compile.quantizers import DelayedScaling, Recipe

__all__ = ["Delayed", "DelayedForGradient", "DelayedOverFsdp"]


class _WithMultiplier:
    """Mixin of placements with a field ``multiplier``: the multipliers (1 / scale) of delayed scaling, (3,)."""

    __slots__ = ()

    has_state: ClassVar[bool] = True

    # ``self: Any``, because subclasses define the fields
    def begin(self: Any, x: Tensor, weight: Tensor, operands: Operands) -> tuple[Operands, tuple[Tensor, ...]]:
        """Return ``operands`` with a copy of the multipliers, and what the op returns after y.

        These are the copied multipliers, the amax of x and the amax of the weight.
        """
        used = snapshot(self.multiplier)
        of_input, of_weight, _ = operands.recipe.delayed()
        amaxes = amax_of(x, of_input), self._amax_of_weight(x, weight, operands, of_weight)
        waits_for = amaxes if operands.phase is Phase.FORWARD else ()
        return replace(operands, multiplier=used, waits_for=waits_for), (used, *amaxes)

    def _amax_of_weight(
        self, x: Tensor, weight: Tensor, operands: Operands, quantizer: DelayedScaling | None
    ) -> Tensor:
        return amax_of(weight, quantizer)

    def empty_beside(self: Any) -> tuple[Tensor, ...]:
        """Return uninitialized tensors for what the op returns after y, for its fake kernel."""
        like = self.multiplier
        return torch.empty_like(like), like.new_empty(()), like.new_empty(())

    def keep_used(self: Any, ctx: Any, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        return keep_used(ctx, self.multiplier, output)


@dataclass(slots=True)
class Delayed(_WithMultiplier, Placement):
    """Placement of a layer with delayed scaling: all tensors, and the state, are whole on this rank.

    Attributes:
        amax_history: The state's last L amaxes of input, weight and grad_output, (3, L) float32.
        multiplier: The state's multipliers (1 / scale) of input, weight and grad_output, (3,) float32.
        group: Name of the process group over which amaxes are reduced, or None.
    """

    updates: ClassVar[tuple[str, ...]] = ("amax_history", "multiplier")

    amax_history: Tensor
    multiplier: Tensor
    group: str | None

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError if the state of delayed scaling does not fit the recipe or the device of ``x``."""
        check_state(x, self.amax_history, self.multiplier, recipe)

    def _amax_of_weight(
        self, x: Tensor, weight: Tensor, operands: Operands, quantizer: DelayedScaling | None
    ) -> Tensor:
        if operands.weight is None:
            return amax_of(weight, quantizer)
        return amax_of(x, None) if quantizer is None else kept_amax(self.amax_history)

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement and no tensors to save, because the backward updates the state in place."""
        return self, ()

    def end(self, ctx: Any, grad_output: Tensor, repeated: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Update the state in the backward; returns the forward's multipliers, and None as each field's gradient.

        Raises a RuntimeError if ``repeated``, the multipliers that checkpointing computed again, have changed.
        """
        check_repeated_forward(ctx, repeated)
        # if a layer is spread over ranks, each rank updates its own copy of the same state
        state = [_compat.replicated(each) for each in (self.amax_history, self.multiplier)]
        every = [*ctx.amaxes, amax_of(grad_output, ctx.recipe.delayed()[2])]
        amaxes = torch.stack([_compat.replicated(each) for each in every])
        if self.group is not None:
            amaxes = all_reduce_amax(amaxes, self.group)
        update_state(state, amaxes, ctx.recipe)
        return ctx.used, (None, None, None)

    def for_grad_input(self, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_input, with ``used``, the forward's multipliers."""
        return DelayedForGradient(used)  # type: ignore[arg-type]  # `end` has returned it

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_weight, with ``used``, the forward's multipliers."""
        return DelayedForGradient(used)  # type: ignore[arg-type]  # `end` has returned it


@dataclass(slots=True)
class DelayedForGradient(Placement):
    """Placement of the gradient ops of a `Delayed` layer; ``multiplier``, (3,) float32, is what the forward used."""

    multiplier: Tensor

    def given(self) -> dict[str, Any]:
        """Return a keyword argument of `Operands`: the multipliers that the forward used."""
        return {"multiplier": self.multiplier}


@dataclass(slots=True)
class DelayedOverFsdp(_WithMultiplier, RowsOverFsdpBase):
    """Placement of a layer with delayed scaling whose weight FSDP shards by rows.

    The values of ``of_activations`` and ``of_weight`` are never read; their gradients carry amaxes to the state.

    Attributes:
        of_activations: (3,) zeros. The gradient holds 1 if the layer's backward ran, the amax of x, and the amax of
            grad_output.
        of_weight: (1,) zero. The gradient is the amax of this rank's rows.
        amax: Amaxes of the whole weight's blocks for the output. If None, the op exchanges those that it needs; it
            needs none for a weight with delayed scaling.
        amax_for_grad_input: The same for grad_input.
        multiplier: Multipliers (1 / scale) of the state, (3,) float32.
        rows: The rows that each rank has.
    """

    of_activations: Tensor | None
    of_weight: Tensor | None
    amax: Tensor | None
    amax_for_grad_input: Tensor | None
    multiplier: Tensor
    rows: Rows

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Accept every recipe: the op `fsdp_tokens` has already checked the state."""

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement without tensors, and the amax for grad_input, which autograd saves."""
        none: dict[str, Any] = dict.fromkeys(
            ("of_activations", "of_weight", "amax", "amax_for_grad_input", "multiplier")
        )
        return replace(self, **none), (self.amax_for_grad_input,)

    def end(self, ctx: Any, grad_output: Tensor, repeated: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the forward's multipliers, and a gradient for each field: amaxes, or None for a field without them.

        Raises a RuntimeError if ``repeated``, the multipliers that checkpointing computed again, have changed, or if
        the gradients can't reach the state.
        """
        place = 2 + ctx.has_bias
        is_eager = type(_compat.local_itself(grad_output)) is Tensor  # in a graph the backward reaches all inputs
        if is_eager and ctx.needs_input_grad[3] and not _compat.will_run(ctx, place):
            raise RuntimeError(
                "fp8compile::fsdp_delayed_linear: torch.autograd.grad was asked for gradients of some tensors only, "
                "and its backward does not reach this layer's state, which would keep old amaxes. Ask for the "
                "gradients of all trained parameters too, call backward(), or compile the model."
            )
        check_repeated_forward(ctx, repeated)
        own = [_compat.replicated(amax_of(grad_output, ctx.recipe.delayed()[2]))]
        of_x, of_weight = ctx.amaxes
        activations = torch.stack([torch.ones_like(of_x), of_x, *own]) if ctx.needs_input_grad[3] else None
        weight = of_weight.view(1) if ctx.needs_input_grad[4] else None
        return ctx.used, (activations, weight, None, None, None, None)
