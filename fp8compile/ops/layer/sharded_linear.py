"""fp8compile::sharded_linear: the linear layer on what one rank of a group has of it; its gradients are two more ops.

    weight cut along       input                       output
    0, out_features        tokens, cut or whole        out_features, cut
    1, in_features         in_features, cut            tokens, cut or whole: what the ranks have is summed

What ranks send is part of the op, so a graph that holds one holds the name of its group: the graph of one group never
runs on another. In a group of one rank nothing is cut and nothing sent.

    arguments of all three, behind the tensors
    weight_dim        0 or 1, as above
    feature_sizes     what each rank has of the weight along it
    sequence_dim      which leading dim of the tokens is cut; None: every rank has all of them
    sequence_sizes    what each rank has along it; not looked at where it is None
    rank, group       this one's number in the group, and the name of that
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.collectives import all_reduce_sum, reduce_scatter_sum
from fp8compile.ops.layer.linear import (
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    for_gradients_of,
    grad_weight_fake,
    linear_samples,
    sample_grad,
    sum_of_tokens,
)
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import Product, multiply_shards
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.layer.shards import DimSharding, Sharding
from fp8compile.quantizers import Recipe

__all__ = ["sharded_grad_input", "sharded_grad_weight", "sharded_linear"]


class Cut(NamedTuple):
    """Where this rank's part of a layer lies; the fields are arguments of the ops, see the head of this file."""

    weight_dim: int
    feature_sizes: Sequence[int]
    sequence_dim: int | None
    sequence_sizes: Sequence[int]
    rank: int
    group: str

    def layout(self, ndim: int) -> _Layout:
        """Where each tensor is cut, for tokens of ``ndim`` dims, features included."""
        if len(self.feature_sizes) == 1:
            return _Layout((None,), (None,), (None,), (None,))
        features = DimSharding(self.group, self.rank, ndim - 1, tuple(self.feature_sizes))
        weight = replace(features, dim=self.weight_dim)
        tokens = None
        if self.sequence_dim is not None:
            tokens = replace(features, dim=self.sequence_dim, sizes=tuple(self.sequence_sizes))
        if self.weight_dim == 0:
            return _Layout((tokens,), (weight,), (weight,), (features,))
        return _Layout((features,), (weight,), (None,), (tokens,))

    def empty(self, like: Tensor, features: int, *, all_tokens: bool) -> Tensor:
        """An empty tensor of the shape of another one, but for its sequence and its features."""
        shape = [*like.shape[:-1], features]
        if self.sequence_dim is not None:
            shape[self.sequence_dim] = sum(self.sequence_sizes) if all_tokens else self.sequence_sizes[self.rank]
        return like.new_empty(shape)


class _Layout(NamedTuple):
    """Where each tensor of the layer is cut; one group, so one entry each."""

    input: Sharding
    weight: Sharding
    bias: Sharding
    output: Sharding


def _whole_or_part(product: Product, tokens: Sharding, group: str) -> Tensor:
    """A product as a rank is to have it: where it's a summand, the sum, for all tokens or for those of this rank."""
    (step,), (cut,) = product.steps, tokens
    local = product.local.view(*product.shape[:-1], product.local.shape[1])
    if step.out == "sum" and cut is None:
        return all_reduce_sum(local, group)
    if step.out == "sum":
        local = reduce_scatter_sum(local, cut.dim, cut.sizes, cut.rank, group)
    return local.contiguous()


# ---------------------------------------------------------------------------------- gradients


def _grad_input(phase: Phase, grad_output: Tensor, weight: Tensor, cut: Cut, recipe: Recipe) -> Tensor:
    layout = cut.layout(grad_output.ndim)
    parts = LocalShard(grad_output, layout.output), LocalShard(weight, layout.weight)
    product = multiply_shards(GRAD_INPUT, *parts, Operands(recipe, phase))
    return _whole_or_part(product, layout.input, cut.group)


def _grad_input_fake(grad_output: Tensor, weight: Tensor, cut: Cut, recipe: Recipe) -> Tensor:
    return cut.empty(grad_output, weight.shape[1], all_tokens=cut.weight_dim == 1)


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, _, *where in _samples():
        yield sample_grad(x, weight), weight, *where


sharded_grad_input = register_product(
    "sharded_grad_input", GRAD_INPUT, _grad_input, fake=_grad_input_fake, samples=_grad_input_samples
)


def _grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, cut: Cut, recipe: Recipe) -> Tensor:
    layout = cut.layout(x.ndim)
    parts = LocalShard(grad_output, layout.output), LocalShard(x, layout.input)
    product = multiply_shards(GRAD_WEIGHT, *parts, Operands(recipe, phase))
    return product.local.contiguous()


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, _, *where in _samples():
        yield sample_grad(x, weight), x, *where


sharded_grad_weight = register_product(
    "sharded_grad_weight", GRAD_WEIGHT, _grad_weight, fake=grad_weight_fake, samples=_grad_weight_samples
)

# ---------------------------------------------------------------------------------- the layer


def _check_no_delayed_scaling(recipe: Recipe) -> None:
    # in the op, for PyTorch 2.11 traces no method of a recipe
    if not _compat.is_stand_in(recipe) and recipe.history():
        raise ValueError(
            "sharded_linear: the recipe has delayed scaling, whose state is kept by layers, and this one is a "
            "function. Take a recipe with current scaling, or a fp8compile.Linear on DTensors."
        )


def _sharded_linear(phase: Phase, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, recipe: Recipe) -> Tensor:
    _check_no_delayed_scaling(recipe)
    layout = cut.layout(x.ndim)
    parts = LocalShard(x, layout.input), LocalShard(weight, layout.weight)
    own = None if bias is None else LocalShard(bias, layout.bias)
    product = multiply_shards(OUTPUT, *parts, Operands(recipe, phase), own)
    return _whole_or_part(product, layout.output, cut.group)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, recipe: Recipe) -> Tensor:
    _check_no_delayed_scaling(recipe)
    return cut.empty(x, weight.shape[0], all_tokens=cut.weight_dim == 0)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, *where, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.where = (*where, for_gradients_of(recipe, x=needs_x, weight=needs_weight))
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def _grad_bias(grad_output: Tensor, cut: Cut) -> Tensor:
    """The bias's gradient over all tokens, wherever they are."""
    own = sum_of_tokens(grad_output)
    parts_of_tokens = cut.weight_dim == 1 and cut.sequence_dim is not None and len(cut.feature_sizes) > 1
    return all_reduce_sum(own, cut.group) if parts_of_tokens else own


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (
        None if weight is None else sharded_grad_input(grad_output, weight, *ctx.where),
        None if x is None else sharded_grad_weight(grad_output, x, *ctx.where),
        _grad_bias(grad_output, Cut(*ctx.where[:-1])) if ctx.needs_input_grad[2] else None,
        *(None for _ in ctx.where),
    )


def _samples() -> Iterator[tuple]:
    """One rank's; more need processes (tests/parallel/test_explicit_groups.py)."""
    for index, (x, weight, bias, recipe) in enumerate(linear_samples()):
        weight_dim = index % 2
        yield x, weight, bias, weight_dim, [weight.shape[weight_dim]], None, [0], 0, "", recipe


sharded_linear = register_product(
    "sharded_linear",
    OUTPUT,
    _sharded_linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    samples=_samples,
)
