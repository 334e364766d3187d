"""fp8compile::fsdp_grouped_linear: experts whose matrices lie on several ranks; its gradients are two more.

    output        own experts --cast--> codes and scales --all-gather--> the grouped product with this rank's own rows
    grad_input    the same with the codes that this direction needs: gathered anew, none are kept
    grad_weight   this rank's product --reduce-scatter--> the mean over ranks, its experts

An expert's matrix is whole on one rank, so its codes and scales are those of `grouped_linear` without a word from the
others, in the dtype of ``x``. Saved for backward is the shard. A product that the recipe leaves in high precision
gathers the matrices in that dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.groups.grouped_mm import group_sum
from fp8compile.ops.layer.fsdp_linear import reduced_as_read
from fp8compile.ops.layer.grouped_linear import (
    for_trained_weight,
    grouped_grad_input_fake,
    grouped_output,
    grouped_samples,
    sample_grad_of_groups,
)
from fp8compile.ops.layer.grouped_operands import GroupedOperands
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, for_gradients_of
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.layer.rows import Rows
from fp8compile.quantizers import Recipe

__all__ = ["fsdp_grouped_grad_input", "fsdp_grouped_grad_weight", "fsdp_grouped_linear"]


def _grad_input(
    phase: Phase, grad_output: Tensor, shard: Tensor, offsets: Tensor, rows: Rows, recipe: Recipe
) -> Tensor:
    operands = GroupedOperands(recipe, offsets, phase, rows=rows)
    return operands.grad_input(grad_output, shard.to(grad_output.dtype))


def _grad_input_samples() -> Iterator[tuple]:
    for x, shard, offsets, _, rows, recipe in _samples():
        yield sample_grad_of_groups(x, shard), shard, offsets, rows, recipe


fsdp_grouped_grad_input = register_product(
    "fsdp_grouped_grad_input", GRAD_INPUT, _grad_input, fake=grouped_grad_input_fake, samples=_grad_input_samples
)


def _grad_weight(
    phase: Phase, grad_output: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype, rows: Rows, recipe: Recipe
) -> Tensor:
    grad_ENK = GroupedOperands(recipe, offsets, phase).grad_weight(grad_output, x)
    return reduced_as_read(grad_ENK, dtype, rows, phase)


def _grad_weight_fake(
    grad_output: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype, rows: Rows, recipe: Recipe
) -> Tensor:
    return grad_output.new_empty((rows.sizes[rows.rank], grad_output.shape[1], x.shape[1]), dtype=dtype)


def _grad_weight_samples() -> Iterator[tuple]:
    for x, shard, offsets, _, rows, recipe in _samples():
        yield sample_grad_of_groups(x, shard), x, offsets, shard.dtype, rows, recipe


fsdp_grouped_grad_weight = register_product(
    "fsdp_grouped_grad_weight", GRAD_WEIGHT, _grad_weight, fake=_grad_weight_fake, samples=_grad_weight_samples
)

# ---------------------------------------------------------------------------------- the layer


def _fsdp_grouped_linear(
    phase: Phase, x: Tensor, shard: Tensor, offsets: Tensor, bias: Tensor | None, rows: Rows, recipe: Recipe
) -> Tensor:
    return grouped_output(x, shard.to(x.dtype), offsets, bias, GroupedOperands(recipe, offsets, phase, rows=rows))


def _fake(x: Tensor, shard: Tensor, offsets: Tensor, bias: Tensor | None, rows: Rows, recipe: Recipe) -> Tensor:
    return x.new_empty((x.shape[0], shard.shape[1]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, shard, offsets, _, ctx.rows, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.recipe, ctx.dtype = for_gradients_of(recipe, x=needs_x, weight=needs_weight), shard.dtype
    ctx.save_for_backward(x if needs_weight else None, shard if needs_x else None, offsets)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, shard, offsets = ctx.saved_tensors
    return (
        None if shard is None else fsdp_grouped_grad_input(grad_output, shard, offsets, ctx.rows, ctx.recipe),
        None if x is None else fsdp_grouped_grad_weight(grad_output, x, offsets, ctx.dtype, ctx.rows, ctx.recipe),
        None,
        group_sum(grad_output, offsets, ctx.recipe.gemm_config(OUTPUT)) if ctx.needs_input_grad[3] else None,
        None,
        None,
    )


def _samples() -> Iterator[tuple]:
    """One rank's; more need processes (tests/parallel/test_fsdp_experts.py)."""
    for index, (x, weight, offsets, bias, recipe) in enumerate(grouped_samples()):
        shard = weight.float() if index % 2 else weight
        yield x, shard, offsets, bias, Rows.alone(weight.shape[0]), recipe


fsdp_grouped_linear = register_product(
    "fsdp_grouped_linear",
    OUTPUT,
    _fsdp_grouped_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    prepare=for_trained_weight,
    samples=_samples,
)
