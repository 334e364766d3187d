"""The state of delayed scaling: its shape, and how a layer uses and updates it.

    state          amax_history (3, L), multiplier (3,): rows for input, weight, grad_output
    forward        returns y, the multipliers (1 / scale) that y used, and the amaxes of x and w
    backward       computes gradients by the same multipliers;  state <- next state(state, amaxes of x, w and dy)

L is the number of amaxes kept. Each backward updates the state once; a forward alone never does. A forward returns the
multipliers that it used, because the backward of another call may update the state in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.ops.amax import amax
from fp8compile.ops.inductor_hints import after, snapshot
from fp8compile.quantizers import TENSORS, DelayedScaling, Recipe
from fp8compile.quantizers.delayed_scaling import next_state

__all__ = [
    "ROW_OF_INPUT",
    "ROW_OF_WEIGHT",
    "amax_of",
    "check_repeated_forward",
    "check_state",
    "keep_used",
    "kept_amax",
    "update_state",
]

ROW_OF_INPUT, ROW_OF_WEIGHT = 0, 1


def amax_of(tensor: Tensor, quantizer: DelayedScaling | None) -> Tensor:
    """Return the amax of a tensor, () float32, or 0 if ``quantizer`` is None."""
    if quantizer is None:
        return tensor.new_zeros((), dtype=torch.float32)
    return amax(tensor, quantizer).view(())


def kept_amax(history: Tensor) -> Tensor:
    """Return from a state's history the amax of the values last written to a weight kept as codes, () float32."""
    return snapshot(history[ROW_OF_WEIGHT, 0])


def next_layer_state(history: Tensor, multiplier: Tensor, amaxes: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return a layer's next history (3, L) and multipliers (3,), from the present ones and a step's amaxes (3,)."""
    quantizers = recipe.delayed()
    rooms = [1.0 if quantizer is None else quantizer.room() for quantizer in quantizers]
    room = torch.stack([torch.full((), each, dtype=torch.float64, device=amaxes.device) for each in rooms])
    algorithm = next(quantizer.algorithm for quantizer in quantizers if quantizer is not None)
    updated, next_multiplier = next_state(history, multiplier, amaxes, room, algorithm)
    # If nothing here depends on the backward's gradient, PyTorch's partitioner would write the history first and then
    # compute the multiplier from the history that was just written. `after` forces the multiplier to come first.
    return after(updated, next_multiplier), next_multiplier


def check_state(x: Tensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> None:
    """Raise a ValueError if the state of delayed scaling does not fit the recipe or the device of ``x``."""
    if _compat.is_stand_in(recipe):
        return
    rows, length = len(TENSORS), recipe.history()
    if not length:
        raise ValueError("linear: `state` was passed, but the recipe has no delayed scaling. Omit state.")
    for name, tensor, shape in (("amax_history", amax_history, (rows, length)), ("multiplier", multiplier, (rows,))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != x.device:
            raise ValueError(
                f"linear: {name} of the state is {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; for "
                f"this recipe and x it must be {shape}, torch.float32, on {x.device}. Create it with "
                "fp8compile.DelayedState.initial(recipe, device=...)."
            )


def keep_used(ctx: Any, multiplier: Tensor, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Save a forward's multipliers and amaxes in autograd's context; returns the multipliers.

    ``multiplier`` is the tensor of the state; ``output`` is y, the multipliers of y, and the amaxes of x and weight.
    """
    _, ctx.used, *ctx.amaxes = output
    ctx.multiplier = multiplier
    ctx.mark_non_differentiable(ctx.used, *ctx.amaxes)
    ctx.set_materialize_grads(False)
    inductor.never_recompute(ctx.used)
    ctx.version = _compat.version_in_eager(_compat.replicated(multiplier))
    # under checkpointing, saved tensors come from the repeated forward, attributes of ctx from the first forward
    return ctx.used


def check_repeated_forward(ctx: Any, repeated: Tensor) -> None:
    """Raise a RuntimeError if ``repeated``, the multipliers of a forward that checkpointing repeated, have changed."""
    now = _compat.version_in_eager(_compat.replicated(ctx.multiplier))
    if ctx.version == now or torch.equal(*map(_compat.replicated, (repeated, ctx.used))):
        return
    raise RuntimeError(
        "Linear: activation checkpointing recomputed this layer's forward with different scales, because a "
        "backward updated its state in between: the layer is called twice per step, or several forwards ran before "
        "their backwards. Compile the model including the checkpointing, which keeps the scales, or use selective "
        "checkpointing with a policy that saves fp8compile.ops.GEMM_OPS."
    )


@torch.no_grad()
def update_state(state: Sequence[Tensor], amaxes: Tensor, recipe: Recipe, *, ran: Tensor | None = None) -> None:
    """Update a layer's state in place: its history (3, L) and its multipliers (3,).

    ``amaxes`` of input, weight and grad_output, (3,), are reduced over all ranks that share the state. ``ran`` is 0 if
    the layer's backward has not run; the state then stays the same.

    Raises:
        RuntimeError: A transform of torch.func runs this backward, and the transformed function does not take the
            state as an argument.
    """
    history, multiplier = state
    updated: Sequence[Tensor] = next_layer_state(history, multiplier, amaxes, recipe)
    if ran is not None:
        updated = [torch.where(ran > 0, new, old) for old, new in zip(state, updated, strict=True)]
    try:
        for old, new in zip(state, updated, strict=True):
            old.copy_(new)
    except RuntimeError as error:
        if not torch._C._are_functorch_transforms_active():
            raise
        raise RuntimeError(
            "linear: the backward updates the state of delayed scaling, but torch.func (grad, vjp, jacrev, vmap) "
            "does not allow writes to tensors that are not arguments of its function. Call backward() or "
            "torch.autograd.grad, or use a recipe without a state, such as fp8compile.recipes.tensorwise(). For "
            "torch.func.grad only, you can instead make the buffers amax_history and multiplier arguments of the "
            "function (functional_call)."
        ) from error
