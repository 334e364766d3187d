"""fp8compile::fsdp_delayed_linear: fp8compile::fsdp_linear for recipes with delayed scaling, and how amaxes travel.

    forward     fsdp_tokens -----------> fsdp_amaxes_together ----------> fsdp_delayed_linear --> y
    backward    state <- next state <--- amaxes over ranks: a message <-- this rank's amaxes <--- gradient of y

A token is zeros that nothing reads, and its gradient is an amax: so autograd brings the amaxes of all layers together
before ranks send them, and updates states last, in whatever order layers run. A layer has two of them, for not all
amaxes are to be known of the same ranks:

    of activations (3,)    1 where the layer's backward ran, amax of x, amax of grad_output
    of the weight (1,)     amax of this rank's rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.collectives import all_reduce_amaxes, sent_in_backward
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer.delayed import (
    amax_of,
    check_repeated_forward,
    check_state,
    delayed_samples,
    keep_used,
    update_state,
)
from fp8compile.ops.layer.fsdp_linear import fsdp_grad_input, fsdp_grad_weight, fsdp_output
from fp8compile.ops.layer.linear import OUTPUT, for_gradients_of, sum_of_tokens
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.layer.rows import Rows
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Recipe
from fp8compile.quantizers.constant import Constant

__all__ = ["AmaxGroups", "fsdp_amaxes_together", "fsdp_delayed_linear", "fsdp_tokens"]

# ---------------------------------------------------------------------------------- tokens, and the state


def _tokens_kernel(origin: Tensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    check_state(origin, amax_history, multiplier, recipe)
    return multiplier.new_zeros(3), multiplier.new_zeros(1)


def _tokens_setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, *ctx.state, ctx.recipe = inputs
    ctx.set_materialize_grads(False)


def _tokens_backward(ctx: Any, activations: Tensor | None, weight: Tensor | None) -> tuple[None, ...]:
    if activations is not None and weight is not None:
        ran, of_x, of_grad = activations.unbind()
        update_state(ctx.state, torch.stack([of_x, weight.view(()), of_grad]), ctx.recipe, ran=ran)
    return None, None, None, None


def _tokens_samples() -> Iterator[tuple]:
    for x, _, _, amax_history, multiplier, _, recipe in delayed_samples():
        yield x, amax_history, multiplier, recipe


fsdp_tokens = register_op(
    "fp8compile::fsdp_tokens",
    _tokens_kernel,
    fake=_tokens_kernel,
    setup_context=_tokens_setup_context,
    backward=_tokens_backward,
    decompose=_tokens_kernel,
    sharding=None,  # its tensors are this rank's
    samples=_tokens_samples,
    updates=("amax_history", "multiplier"),
)

# ---------------------------------------------------------------------------------- one message


@dataclass(frozen=True, repr=False)
class AmaxGroups(Constant):
    """Over which ranks amaxes become one.

    Attributes:
        names: Of groups, one after the other.
    """

    names: tuple[str, ...]


def _together_kernel(tokens: Tensor, groups: AmaxGroups) -> Tensor:
    return tokens.clone()


def _together_setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.groups = inputs


def _together_backward(ctx: Any, amaxes: Tensor) -> tuple[Tensor, None]:
    # those of weights are known before the backward, where compilers would send them from the forward
    with sent_in_backward():
        return all_reduce_amaxes([amaxes], [ctx.groups.names])[0], None


def _together_samples() -> Iterator[tuple]:
    """One rank's; more need processes (tests/parallel/test_graph_fsdp_delayed.py)."""
    yield torch.zeros(8), AmaxGroups(())
    yield torch.zeros(12)[::3], AmaxGroups(())
    yield torch.zeros(0), AmaxGroups(())


fsdp_amaxes_together = register_op(
    "fp8compile::fsdp_amaxes_together",
    _together_kernel,
    fake=_together_kernel,
    setup_context=_together_setup_context,
    backward=_together_backward,
    decompose=_together_kernel,
    sharding=None,
    samples=_together_samples,
)

# ---------------------------------------------------------------------------------- the layer


def _fsdp_delayed_linear(
    phase: Phase,
    x: Tensor,
    shard: Tensor,
    bias: Tensor | None,
    of_activations: Tensor | None,
    of_weight: Tensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    multiplier: Tensor,
    rows: Rows,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    used, shard = snapshot(multiplier), shard.to(x.dtype)
    amaxes = tuple(amax_of(tensor, each) for tensor, each in zip((x, shard), recipe.delayed(), strict=False))
    waits_for = amaxes if phase is Phase.FORWARD else ()
    operands = Operands(recipe, phase, used, waits_for=waits_for, weight_amax=amax, rows=rows)
    return fsdp_output(x, shard, bias, operands), used, *amaxes


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, multiplier, rows, _ = rest
    y = x.new_empty((*x.shape[:-1], sum(rows.sizes)))
    return y, torch.empty_like(multiplier), multiplier.new_empty(()), multiplier.new_empty(())


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, shard, bias, _, _, _, amax, ctx.multiplier, ctx.rows, ctx.recipe = inputs
    ctx.place_of_tokens = 2 if bias is None else 3
    _, ctx.used, *ctx.amaxes = output
    ctx.dtype = shard.dtype
    ctx.placements = _compat.placement_of(x)
    keep_used(ctx)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, shard if needs_x else None, amax if needs_x else None, ctx.used)


def _check_tokens_get_there(ctx: Any, grad_output: Tensor) -> None:
    is_eager = type(_compat.local_itself(grad_output)) is Tensor  # a graph has the backward to everything
    if is_eager and ctx.needs_input_grad[3] and not _compat.will_run(ctx, ctx.place_of_tokens):
        raise RuntimeError(
            "fp8compile::fsdp_delayed_linear: torch.autograd.grad was asked for gradients of some tensors only, and "
            "its backward does not reach this layer's state, which would keep old amaxes. Ask for the gradients of "
            "all trained parameters too, call backward(), or compile the model."
        )


def _backward(ctx: Any, grad_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    _check_tokens_get_there(ctx, grad_output)
    x, shard, amax, repeated = ctx.saved_tensors
    check_repeated_forward(ctx, repeated)
    own = [_compat.replicated(amax_of(grad_output, ctx.recipe.delayed()[2]))]
    of_x, of_weight = ctx.amaxes
    recipe = for_gradients_of(ctx.recipe, x=shard is not None, weight=x is not None)
    grad_x = None if shard is None else fsdp_grad_input(grad_output, shard, amax, ctx.used, ctx.rows, recipe)
    return (
        _compat.scattered_like(grad_x, ctx.placements),
        None if x is None else fsdp_grad_weight(grad_output, x, ctx.used, ctx.dtype, ctx.rows, recipe),
        sum_of_tokens(grad_output) if ctx.needs_input_grad[2] else None,
        torch.stack([torch.ones_like(of_x), of_x, *own]) if ctx.needs_input_grad[3] else None,
        of_weight.view(1) if ctx.needs_input_grad[4] else None,
        *(None,) * 5,
    )


def _samples() -> Iterator[tuple]:
    """One rank's, as for the gradients."""
    for x, weight, bias, _, multiplier, _, recipe in delayed_samples():
        tokens = torch.zeros(3), torch.zeros(1)
        yield x, weight.float(), bias, *tokens, None, None, multiplier, Rows.alone(weight.shape[0]), recipe


fsdp_delayed_linear = register_product(
    "fsdp_delayed_linear",
    OUTPUT,
    _fsdp_delayed_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    samples=_samples,
)
