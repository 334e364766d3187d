"""fp8compile::fsdp_amax_carriers and fsdp_amaxes_together: carry amaxes to the state of delayed scaling.

    forward     fsdp_amax_carriers ----> fsdp_amaxes_together ----------> delayed_linear ------> y
    backward    state <- next state <--- amaxes over ranks: a message <-- this rank's amaxes <--- gradient of y

A carrier is a tensor of zeros that nothing reads. Its gradient carries amaxes, which autograd collects from all layers
before ranks reduce them. The carrier of activations, (3,), carries 1 if the layer's backward ran, the amax of x and
the amax of grad_output. The carrier of the weight, (1,), is separate because its amax is reduced over other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.collectives import all_reduce_amaxes, sent_in_backward
from fp8compile.ops.layer.delayed_scaling_state import check_state, update_state
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Recipe
from fp8compile.quantizers.constant import Constant

__all__ = ["AmaxGroups", "fsdp_amaxes_together", "fsdp_amax_carriers"]

# ---------------------------------------------------------------------------------- tokens, and the state


def _tokens_kernel(origin: Tensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    check_state(origin, amax_history, multiplier, recipe)
    return multiplier.new_zeros(3), multiplier.new_zeros(1)


def _tokens_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *ctx.state, ctx.recipe = inputs
    ctx.set_materialize_grads(False)


def _tokens_backward(ctx: Any, activations: Tensor | None, weight: Tensor | None) -> tuple[None, ...]:
    if activations is not None and weight is not None:
        ran, of_x, of_grad = activations.unbind()
        update_state(ctx.state, torch.stack([of_x, weight.view(()), of_grad]), ctx.recipe, ran=ran)
    return None, None, None, None


fsdp_amax_carriers: OpOverload = register_op(
    "fp8compile::fsdp_amax_carriers",
    _tokens_kernel,
    fake=_tokens_kernel,
    setup_context=_tokens_setup_context,
    backward=_tokens_backward,
    decompose=_tokens_kernel,
    sharding=None,  # takes tensors of this rank alone, never DTensors
    updates=("amax_history", "multiplier"),
)

# ---------------------------------------------------------------------------------- one message


@dataclass(frozen=True, repr=False)
class AmaxGroups(Constant):
    """The process groups over which amaxes are reduced, as a constant of the graph.

    Attributes:
        names: Names of the groups, in the order in which amaxes are reduced over them.
    """

    names: tuple[str, ...]


def _together_kernel(tokens: Tensor, groups: AmaxGroups) -> Tensor:
    return tokens.clone()


def _together_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.groups = inputs


def _together_backward(ctx: Any, amaxes: Tensor) -> tuple[Tensor, None]:
    # amaxes of weights are known before the backward; without this mark compilers would send them in the forward
    with sent_in_backward():
        return all_reduce_amaxes([amaxes], [ctx.groups.names])[0], None


fsdp_amaxes_together: OpOverload = register_op(
    "fp8compile::fsdp_amaxes_together",
    _together_kernel,
    fake=_together_kernel,
    setup_context=_together_setup_context,
    backward=_together_backward,
    decompose=_together_kernel,
    sharding=None,
)
