"""fp8compile::fsdp_linear: the linear layer on a weight of which each rank has some rows; its gradients are two more.

    output        shard --amax over ranks, cast--> codes --all-gather--> the product with this rank's own tokens
    grad_input    the same with the codes that this direction needs: gathered anew, none are kept
    grad_weight   this rank's product --reduce-scatter--> the mean over ranks, its rows

Codes and scales of the weight are those that a layer on the whole weight has, in the dtype of ``x``; what is saved for
backward is the shard. A product that the recipe leaves in high precision gathers the weight in that dtype.

``amax`` is that of the whole weight for the output, ``amax_for_grad_input`` that for grad_input: ranks can send those
of all layers at once. Where one is None, the op sends what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.amax import amax as amax_of
from fp8compile.ops.layer.fsdp_gather import reduced
from fp8compile.ops.layer.linear import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    for_gradients_of,
    grad_input_fake,
    layer_grad_input,
    layer_grad_weight,
    layer_output,
    linear_samples,
    sample_grad,
    sum_of_tokens,
)
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import as_read
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.layer.rows import Rows
from fp8compile.quantizers import Recipe

__all__ = ["fsdp_grad_input", "fsdp_grad_weight", "fsdp_linear", "fsdp_output", "reduced_as_read"]


def _grad_input(
    phase: Phase,
    grad_output: Tensor,
    shard: Tensor,
    amax: Tensor | None,
    multiplier: Tensor | None,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    operands = Operands(recipe, phase, multiplier, weight_amax=amax, rows=rows)
    return layer_grad_input(grad_output, shard.to(grad_output.dtype), operands)


def _grad_input_samples() -> Iterator[tuple]:
    for x, shard, _, _, amax, rows, recipe in _samples():
        yield sample_grad(x, shard), shard, amax, None, rows, recipe


fsdp_grad_input = register_product(
    "fsdp_grad_input", GRAD_INPUT, _grad_input, fake=grad_input_fake, samples=_grad_input_samples
)


def reduced_as_read(grad: Tensor, dtype: torch.dtype, rows: Rows, phase: Phase) -> Tensor:
    """This rank's part of the mean of a weight's gradient, `reduced`, in fused code too.

    There it is rounded to its dtype before it is cast to that of the reduction.
    """
    if grad.dtype != getattr(torch, rows.reduce_dtype):
        grad = as_read(grad, phase)
    return reduced(grad, dtype, rows).contiguous()


def _grad_weight(
    phase: Phase,
    grad_output: Tensor,
    x: Tensor,
    multiplier: Tensor | None,
    dtype: torch.dtype,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    grad_NK = layer_grad_weight(grad_output, x, Operands(recipe, phase, multiplier))
    return reduced_as_read(grad_NK, dtype, rows, phase)


def _grad_weight_fake(
    grad_output: Tensor, x: Tensor, multiplier: Tensor | None, dtype: torch.dtype, rows: Rows, recipe: Recipe
) -> Tensor:
    return grad_output.new_empty((rows.sizes[rows.rank], x.shape[-1]), dtype=dtype)


def _grad_weight_samples() -> Iterator[tuple]:
    for x, shard, _, _, _, rows, recipe in _samples():
        yield sample_grad(x, shard), x, None, shard.dtype, rows, recipe


fsdp_grad_weight = register_product(
    "fsdp_grad_weight", GRAD_WEIGHT, _grad_weight, fake=_grad_weight_fake, samples=_grad_weight_samples
)

# ---------------------------------------------------------------------------------- the layer


def fsdp_output(x: Tensor, shard: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """What `fsdp_linear` computes, by given operands: those of the layer on the weight in the dtype of ``x``."""
    return layer_output(x, shard.to(x.dtype), bias, operands)


def _check_no_delayed_scaling(recipe: Recipe) -> None:
    # in the op, for PyTorch 2.11 traces no method of a recipe
    if not _compat.is_stand_in(recipe) and recipe.history():
        raise ValueError(
            "fsdp_linear: the recipe has delayed scaling, whose state this op has no place for. Take "
            "fsdp_delayed_linear."
        )


def _fsdp_linear(
    phase: Phase,
    x: Tensor,
    shard: Tensor,
    bias: Tensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    _check_no_delayed_scaling(recipe)
    return fsdp_output(x, shard, bias, Operands(recipe, phase, weight_amax=amax, rows=rows))


def _fake(
    x: Tensor,
    shard: Tensor,
    bias: Tensor | None,
    amax: Tensor | None,
    amax_for_grad_input: Tensor | None,
    rows: Rows,
    recipe: Recipe,
) -> Tensor:
    _check_no_delayed_scaling(recipe)
    return x.new_empty((*x.shape[:-1], sum(rows.sizes)))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, shard, _, _, amax, ctx.rows, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.recipe = for_gradients_of(recipe, x=needs_x, weight=needs_weight)
    ctx.dtype = shard.dtype
    ctx.placements = _compat.placement_of(x)
    ctx.save_for_backward(x if needs_weight else None, shard if needs_x else None, amax if needs_x else None)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, shard, amax = ctx.saved_tensors
    grad_x = None if shard is None else fsdp_grad_input(grad_output, shard, amax, None, ctx.rows, ctx.recipe)
    return (
        _compat.scattered_like(grad_x, ctx.placements),
        None if x is None else fsdp_grad_weight(grad_output, x, None, ctx.dtype, ctx.rows, ctx.recipe),
        sum_of_tokens(grad_output) if ctx.needs_input_grad[2] else None,
        None,
        None,
        None,
        None,
    )


def _samples() -> Iterator[tuple]:
    """One rank's; more need processes (tests/parallel/test_graph_fsdp.py)."""
    for index, (x, weight, bias, recipe) in enumerate(linear_samples()):
        shard = weight.float() if index % 2 else weight
        known = [None, None]
        if index % 3 == 0:
            slots = (recipe.weight, recipe.weight_for_grad_input)
            known = [None if each is None else amax_of(weight, each) for each in slots]
        yield x, shard, bias, *known, Rows.alone(weight.shape[0]), recipe


fsdp_linear = register_product(
    "fsdp_linear", OUTPUT, _fsdp_linear, fake=_fake, setup_context=_setup_context, backward=_backward, samples=_samples
)
