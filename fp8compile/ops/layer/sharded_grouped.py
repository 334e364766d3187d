"""fp8compile::sharded_grouped_linear: experts of whose matrices each rank has a part; its gradients are two more ops.

    matrices cut along    input rows            output rows
    1, out_features       whole                 out_features, cut
    2, in_features        in_features, cut      whole: what the ranks have is summed

Every rank has all rows. What ranks send is part of the op: amaxes of blocks that several ranks have elements of, and
sums of the output or of grad_input. A rank's part ends where a block ends, or blocks reach over all ranks.

    arguments of all three, behind the tensors
    weight_dim        1 or 2, as above
    feature_sizes     what each rank has of each matrix along it
    rank, group       this one's number in the group, and the name of that
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fp8compile.ops.collectives import all_reduce_sum
from fp8compile.ops.groups.grouped_mm import group_sum
from fp8compile.ops.layer.grouped_linear import (
    for_trained_weight,
    grouped_grad_input_fake,
    grouped_grad_weight_fake,
    grouped_samples,
    sample_grad_of_groups,
    with_bias_of_groups,
)
from fp8compile.ops.layer.grouped_operands import GroupedOperands, check_cut_of_groups, check_recipe_of_groups
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, for_gradients_of
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.layer.shards import DimSharding
from fp8compile.quantizers import Recipe

__all__ = ["sharded_grouped_grad_input", "sharded_grouped_grad_weight", "sharded_grouped_linear"]

OUT_FEATURES, IN_FEATURES = 1, 2


class Part(NamedTuple):
    """What this rank has of the matrices; the fields are arguments of the ops, see the head of this file."""

    weight_dim: int
    feature_sizes: Sequence[int]
    rank: int
    group: str

    def cut(self) -> DimSharding | None:
        """How ranks share each matrix; None in a group of one rank."""
        sizes = tuple(self.feature_sizes)
        return DimSharding(self.group, self.rank, self.weight_dim, sizes) if len(sizes) > 1 else None


def _sum(part: Tensor, cut: DimSharding | None) -> Tensor:
    return part if cut is None else all_reduce_sum(part, cut.group)


# ---------------------------------------------------------------------------------- gradients


def _grad_input(
    phase: Phase, grad_output: Tensor, weight: Tensor, offsets: Tensor, part: Part, recipe: Recipe
) -> Tensor:
    cut = part.cut()
    found = GroupedOperands(recipe, offsets, phase, cut=cut).grad_input(grad_output, weight)
    return _sum(found, cut) if part.weight_dim == OUT_FEATURES else found


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, offsets, _, *where in _samples():
        yield sample_grad_of_groups(x, weight), weight, offsets, *where


sharded_grouped_grad_input = register_product(
    "sharded_grouped_grad_input", GRAD_INPUT, _grad_input, fake=grouped_grad_input_fake, samples=_grad_input_samples
)


def _grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, offsets: Tensor, part: Part, recipe: Recipe) -> Tensor:
    cut = part.cut()
    return GroupedOperands(recipe, offsets, phase, cut=cut).grad_weight(grad_output, x)


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, offsets, _, *where in _samples():
        yield sample_grad_of_groups(x, weight), x, offsets, *where


sharded_grouped_grad_weight = register_product(
    "sharded_grouped_grad_weight",
    GRAD_WEIGHT,
    _grad_weight,
    fake=grouped_grad_weight_fake,
    samples=_grad_weight_samples,
)

# ---------------------------------------------------------------------------------- the layer


def _sharded_grouped_linear(
    phase: Phase, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, part: Part, recipe: Recipe
) -> Tensor:
    cut = part.cut()
    check_recipe_of_groups(recipe)
    check_cut_of_groups(recipe, cut)
    y = GroupedOperands(recipe, offsets, phase, cut=cut).output(x, weight)
    y = _sum(y, cut) if part.weight_dim == IN_FEATURES else y
    return with_bias_of_groups(y, bias, offsets, phase)


def _fake(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, part: Part, recipe: Recipe) -> Tensor:
    check_recipe_of_groups(recipe)
    check_cut_of_groups(recipe, part.cut())
    return x.new_empty((x.shape[0], weight.shape[1]))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, offsets, _, *where, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.where = (*where, for_gradients_of(recipe, x=needs_x, weight=needs_weight))
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    *_, recipe = ctx.where
    return (
        None if weight is None else sharded_grouped_grad_input(grad_output, weight, offsets, *ctx.where),
        None if x is None else sharded_grouped_grad_weight(grad_output, x, offsets, *ctx.where),
        None,
        group_sum(grad_output, offsets, recipe.gemm_config(OUTPUT)) if ctx.needs_input_grad[3] else None,
        *(None for _ in ctx.where),
    )


def _samples() -> Iterator[tuple]:
    """One rank's; more need processes (tests/parallel/test_grouped_functions.py)."""
    for index, (x, weight, offsets, bias, recipe) in enumerate(grouped_samples()):
        weight_dim = 1 + index % 2
        yield x, weight, offsets, bias, weight_dim, [weight.shape[weight_dim]], 0, "", recipe


sharded_grouped_linear = register_product(
    "sharded_grouped_linear",
    OUTPUT,
    _sharded_grouped_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    prepare=for_trained_weight,
    samples=_samples,
)
