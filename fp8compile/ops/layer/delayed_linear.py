"""fp8compile::delayed_linear: the output of a linear layer with delayed scaling; gradients are the ops of all layers.

It is a separate op, because it returns the amaxes of the forward besides the output, and because its backward moves
amaxes to the state in one of two ways:

    in place     the backward updates ``amax_history`` and ``multiplier``; all tensors are full, or DTensors
    carriers     the amaxes are the gradients of two tensors of zeros, see `fp8compile.ops.layer.fsdp_delayed_amaxes`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer import output_and_gradients as gemms
from fp8compile.ops.layer.delayed_scaling_state import (
    amax_of,
    check_repeated_forward,
    check_state,
    keep_used,
    update_state,
)
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_ops import TAIL, empty_output, gradients, keep_operands, register_layer_op
from fp8compile.ops.layer.operands import OUTPUT, Phase
from fp8compile.quantizers import Recipe

__all__ = ["check_delayed", "delayed_linear"]


def check_delayed(x: Tensor, history: Tensor | None, multiplier: Tensor, recipe: Recipe) -> None:
    """Raise a ValueError if the state of delayed scaling does not fit the recipe or the device of ``x``."""
    if history is not None:  # under FSDP, the op `fsdp_amax_carriers` has checked the state
        check_state(x, history, multiplier, recipe)


def _compute(
    phase: Phase,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activations_carrier: Tensor | None,
    weight_carrier: Tensor | None,
    amax_history: Tensor | None,
    multiplier: Tensor,
    amax_group: str | None,
    args: LayerArgs,
    /,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_delayed(x, amax_history, multiplier, args.recipe)
    return gemms.delayed_output(phase, x, weight, bias, multiplier, amax_history, args, **given)


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    *_, history, multiplier, _ = others[:-TAIL]
    args = LayerArgs.of(*others[-TAIL:])
    check_delayed(x, history, multiplier, args.recipe)
    beside = torch.empty_like(multiplier), multiplier.new_empty(()), multiplier.new_empty(())
    return empty_output(x, weight, args), *beside


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, _, bias, _, _, ctx.history, multiplier, ctx.amax_group, *_ = inputs
    ctx.has_bias = bias is not None
    keep_operands(ctx, inputs, keep_used(ctx, multiplier, output))


def _update_in_place(ctx: Any, of_grad: Tensor) -> tuple[None, None]:
    # if a layer is spread over ranks, each rank updates its own copy of the same state
    state = [_compat.replicated(each) for each in (ctx.history, ctx.multiplier)]
    amaxes = torch.stack([_compat.replicated(each) for each in (*ctx.amaxes, of_grad)])
    if ctx.amax_group is not None:
        amaxes = all_reduce_amax(amaxes, ctx.amax_group)
    update_state(state, amaxes, ctx.tail[-1])
    return None, None


def _check_reaches_state(ctx: Any, grad_output: Tensor) -> None:
    is_eager = type(_compat.local_itself(grad_output)) is Tensor  # in a graph the backward reaches all inputs
    if is_eager and ctx.needs_input_grad[3] and not _compat.will_run(ctx, 2 + ctx.has_bias):
        raise RuntimeError(
            "fp8compile::delayed_linear: torch.autograd.grad was called for gradients of only some tensors, so its "
            "backward does not reach this layer's state, which would keep old amaxes. Also request the gradients of "
            "all trained parameters, call backward(), or compile the model."
        )


def _gradients_of_carriers(ctx: Any, of_grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    of_x, of_weight = ctx.amaxes
    of_grad = _compat.replicated(of_grad)
    activations = torch.stack([torch.ones_like(of_x), of_x, of_grad]) if ctx.needs_input_grad[3] else None
    return activations, of_weight.view(1) if ctx.needs_input_grad[4] else None


def _backward(ctx: Any, grad_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if ctx.history is None:
        _check_reaches_state(ctx, grad_output)
    check_repeated_forward(ctx, saved[3])
    of_grad = amax_of(grad_output, ctx.tail[-1].delayed()[2])
    carriers = (_gradients_of_carriers if ctx.history is None else _update_in_place)(ctx, of_grad)
    return *gradients(ctx, grad_output, saved, ctx.used), *carriers, None, None, None, *(None,) * TAIL


delayed_linear: OpOverload = register_layer_op(
    "delayed_linear",
    OUTPUT,
    _compute,
    fake=_empty,
    setup_context=_setup_context,
    backward=_backward,
    updates=("amax_history", "multiplier"),
)
