"""fp8compile::grouped_linear: a linear layer for each group of tokens, such as experts; its gradients are two ops.

    grouped_linear       y_RN  = x_RK  @ w_eNK^T + b_eN    each row by the matrix of its group
    grouped_grad_input   dx_RK = dy_RN @ w_eNK
    grouped_grad_weight  dw_eNK = dy_RN^T @ x_RK           over the rows of each group

Rows are sorted by group, and ``offsets`` (E,) int32 says where each group ends. Sizes of groups are data: the host
never waits for them, and no graph depends on them. Rows behind the last group are never read by an amax or a product,
and are zeros in y and in dx.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops import samples
from fp8compile.ops.groups.grouped_mm import group_sum
from fp8compile.ops.groups.layout import group_to_read, zero_behind
from fp8compile.ops.groups.scaled_grouped_mm import sample_offsets
from fp8compile.ops.layer.grouped_operands import GroupedOperands, check_recipe_of_groups
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, for_gradients_of
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.products import as_read
from fp8compile.ops.layer.register_product import register_product
from fp8compile.quantizers import Recipe

__all__ = ["grouped_grad_input", "grouped_grad_weight", "grouped_linear", "grouped_output", "grouped_samples"]


def _grad_input(phase: Phase, grad_output: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe) -> Tensor:
    return GroupedOperands(recipe, offsets, phase).grad_input(grad_output, weight)


def grouped_grad_input_fake(grad_output: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """An empty grad_input, for all families of grouped layers."""
    return grad_output.new_empty((grad_output.shape[0], weight.shape[2]))


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, offsets, _, recipe in grouped_samples():
        yield sample_grad_of_groups(x, weight), weight, offsets, recipe


grouped_grad_input = register_product(
    "grouped_grad_input", GRAD_INPUT, _grad_input, fake=grouped_grad_input_fake, samples=_grad_input_samples
)


def _grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, offsets: Tensor, recipe: Recipe) -> Tensor:
    return GroupedOperands(recipe, offsets, phase).grad_weight(grad_output, x)


def grouped_grad_weight_fake(grad_output: Tensor, x: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """An empty grad_weight, for all families of grouped layers whose experts aren't cut by FSDP."""
    return grad_output.new_empty((offsets.shape[0], grad_output.shape[1], x.shape[1]))


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, offsets, _, recipe in grouped_samples():
        yield sample_grad_of_groups(x, weight), x, offsets, recipe


grouped_grad_weight = register_product(
    "grouped_grad_weight", GRAD_WEIGHT, _grad_weight, fake=grouped_grad_weight_fake, samples=_grad_weight_samples
)

# ---------------------------------------------------------------------------------- the layer


def with_bias_of_groups(y: Tensor, bias: Tensor | None, offsets: Tensor, phase: Phase) -> Tensor:
    """A grouped output and the bias (E, N) of each row's group; zeros behind the last group."""
    if bias is None:
        return y
    return zero_behind(y + as_read(bias, phase)[group_to_read(offsets, y.shape[0])], offsets)


def grouped_output(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, operands: GroupedOperands
) -> Tensor:
    """What `grouped_linear` computes, by given operands."""
    check_recipe_of_groups(operands.recipe)
    return with_bias_of_groups(operands.output(x, weight), bias, offsets, operands.phase)


def for_trained_weight(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Arguments of a layer of groups: the forward of a frozen weight makes no codes for a gradient that nobody takes.

    Args:
        needs_input_grad: Of each argument; the second is the weight.
        args: Those of the op, the recipe last.
    """
    *others, recipe = args
    if needs_input_grad[1] or _compat.is_stand_in(recipe):
        return args
    return *others, replace(recipe, grad_output_for_grad_weight=None, input_for_grad_weight=None)


def _grouped_linear(
    phase: Phase, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe
) -> Tensor:
    return grouped_output(x, weight, offsets, bias, GroupedOperands(recipe, offsets, phase))


def _fake(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    check_recipe_of_groups(recipe)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, offsets, _, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.recipe = for_gradients_of(recipe, x=needs_x, weight=needs_weight)
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    needs_bias = ctx.needs_input_grad[3]
    return (
        None if weight is None else grouped_grad_input(grad_output, weight, offsets, ctx.recipe),
        None if x is None else grouped_grad_weight(grad_output, x, offsets, ctx.recipe),
        None,
        group_sum(grad_output, offsets, ctx.recipe.gemm_config(OUTPUT)) if needs_bias else None,
        None,
    )


def sample_grad_of_groups(x: Tensor, weight: Tensor) -> Tensor:
    """A grad_output for a sample, not contiguous."""
    grad = torch.randn((weight.shape[1], x.shape[0]), generator=torch.Generator().manual_seed(1))
    return grad.to(x.dtype).t()


def grouped_samples() -> Iterator[tuple]:
    """Arguments of the op, for tests of it and of its likes."""
    generator = torch.Generator().manual_seed(0)
    for recipe in samples.recipes():
        for offsets in sample_offsets():
            x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((12, 24), (3, 20, 24)))
            x[int(offsets[-1]) :] = torch.nan
            yield x, weight, offsets, torch.ones(3, 20, dtype=x.dtype), recipe
    # offsets are those of no rows
    yield x.float(), weight.float().transpose(1, 2).contiguous().transpose(1, 2), offsets, None, recipe
    yield x[:0], weight, offsets, None, recipe


grouped_linear = register_product(
    "grouped_linear",
    OUTPUT,
    _grouped_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    prepare=for_trained_weight,
    samples=grouped_samples,
)
