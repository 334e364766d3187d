"""Layers of groups: any sizes, rows behind the last group, recipes and values, against a linear for each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from cases import Drawn, dtypes, recipes, tensors
from hypothesis import strategies as st
from torch import Tensor

import fp8compile as f8
from fp8compile.ops.layer.check_recipe_of_groups import check_recipe_of_groups
from fp8compile.quantizers import GEMMS

__all__ = ["Grouped", "groups", "groups_are_linears", "groups_are_linears_compiled", "reused_groups"]

Same = Callable[..., None]


@dataclass(frozen=True)
class Grouped:
    """A call of ``f8.grouped_linear`` and of its backward, described.

    Attributes:
        recipe: For each product.
        sizes: Rows of each group.
        tail: Rows behind the last group, NaN in x and in the gradient.
        x: (rows, in_features), the tail among the rows.
        weight: (groups, out_features, in_features).
        bias: (groups, out_features) or None.
        grad_output: (rows, out_features).
    """

    recipe: f8.Recipe
    sizes: tuple[int, ...]
    tail: int
    x: Drawn
    weight: Drawn
    bias: Drawn | None
    grad_output: Drawn

    def offsets(self) -> Tensor:
        """Where each group ends."""
        return torch.tensor(self.sizes).cumsum(0).to(torch.int32)

    def tensors(self) -> list[Tensor | None]:
        """x, weight, bias or None, grad_output; NaN behind the last group."""
        x, weight, grad_output = (each.tensor() for each in (self.x, self.weight, self.grad_output))
        for rows in (x, grad_output):
            rows[sum(self.sizes) :] = torch.nan
        return [x, weight, None if self.bias is None else self.bias.tensor(), grad_output]

    def kinds(self) -> tuple[str, ...]:
        """The classes that it belongs to."""
        found = [self.x.dtype, "a tail of NaN" if self.tail else "no tail", "bias" if self.bias else "no bias"]
        found += ["an empty group"] if 0 in self.sizes else []
        found += ["no rows at all"] if not any(self.sizes) else []
        return tuple(found)


SIZES = st.one_of(st.just(0), st.integers(1, 6), st.sampled_from((15, 16, 17, 32, 33, 130)))
FEATURES = st.one_of(st.integers(1, 40), st.sampled_from((16, 48, 129)))


def _takes_groups(recipe: f8.Recipe) -> bool:
    try:
        check_recipe_of_groups(recipe)
    except ValueError:
        return False
    return True


@st.composite
def groups(
    draw: st.DrawFn,
    recipe: st.SearchStrategy[f8.Recipe] | None = None,
    count: st.SearchStrategy[int] | None = None,
    features: st.SearchStrategy[int] | None = None,
    dtype: st.SearchStrategy[str] = dtypes,
    layouts: tuple[str, ...] = ("contiguous", "transposed"),
) -> Grouped:
    """Any layer of groups, or one of these recipes, numbers of groups and features, dtypes and layouts."""
    features = FEATURES if features is None else features
    experts, k, n, name = (
        draw(st.integers(1, 5) if count is None else count),
        draw(features),
        draw(features),
        draw(dtype),
    )
    sizes = tuple(draw(st.lists(SIZES, min_size=experts, max_size=experts)))
    tail = draw(st.sampled_from((0, 0, 1, 20)))
    rows = sum(sizes) + tail

    def drawn(*shape: int) -> Drawn:
        return draw(tensors(shape, name, layouts=layouts))

    return Grouped(
        recipe=draw(recipes().filter(_takes_groups) if recipe is None else recipe),
        sizes=sizes,
        tail=tail,
        x=drawn(rows, k),
        weight=drawn(experts, n, k),
        bias=draw(tensors((experts, n), name, layouts=("contiguous",))) if draw(st.booleans()) else None,
        grad_output=drawn(rows, n),
    )


def reused_groups() -> st.SearchStrategy[Grouped]:
    """Layers of groups that share graphs: few recipes and matrices, any rows in any groups."""
    few = (f8.recipes.rowwise_bf16_wgrad(), f8.recipes.rowwise(scale="pow2"), f8.recipes.mxfp8())
    return groups(
        recipe=st.sampled_from(few),
        count=st.just(4),
        features=st.just(32),
        dtype=st.sampled_from(("bf16", "fp32")),
        layouts=("contiguous",),  # AOTAutograd makes grad_output contiguous; PyTorch's bf16 products differ by strides
    )


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: f8.Recipe) -> Tensor:
    return f8.grouped_linear(x, weight, offsets, bias, recipe=recipe)


@cache
def _compiled() -> Callable:
    return torch.compile(_grouped_linear, fullgraph=True, backend="aot_eager", dynamic=True)


def _results(y: Tensor, leaves: list[Tensor | None], grad_output: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], grad_output)]


def _leaves(inputs: list[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.detach().clone().requires_grad_() for each in inputs]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: f8.Recipe) -> Tensor:
    """A linear, whose bias in high precision is added to the rounded product, as experts of transformers do."""
    if bias is None or recipe.quantizers(GEMMS[0]) is not None:
        return f8.linear(x, weight, bias, recipe=recipe)
    return f8.linear(x, weight, recipe=recipe) + bias


def _by_linears(case: Grouped) -> list[Tensor]:
    """What ``f8.linear`` makes of each group; zeros behind the last one, and of a weight that no row met."""
    *inputs, grad_output = case.tensors()
    x, weight, bias = inputs
    kept = [torch.zeros_like(grad_output), *(torch.zeros_like(each) for each in inputs if each is not None)]
    start = 0
    for group, size in enumerate(case.sizes):
        rows = slice(start, start + size)
        start += size
        if not size:
            continue
        leaves = _leaves([x[rows], weight[group], None if bias is None else bias[group]])
        y = _linear(*leaves, case.recipe)
        for whole, part, where in zip(
            kept, _results(y, leaves, grad_output[rows]), (rows, rows, group, group), strict=False
        ):
            whole[where] = part
    return kept


def _check(call: Callable, case: Grouped, same: Same) -> tuple[str, ...]:
    *inputs, grad_output = case.tensors()
    before = [None if each is None else each.clone() for each in (*inputs, grad_output)]
    leaves = _leaves(inputs)
    actual = _results(call(*leaves, case.offsets(), case.recipe), leaves, grad_output)
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    for name, a, e in zip(names, actual, _by_linears(case), strict=False):
        same(a, e, name)
    for each, copy in zip((*inputs, grad_output), before, strict=True):
        if each is not None:
            same(each, copy, "an input was changed:")
    return case.kinds()


def groups_are_linears(case: Grouped, same: Same) -> tuple[str, ...]:
    """Each group's rows and gradients have the bits of a linear of its own; behind the last group there are zeros."""
    return _check(_grouped_linear, case, same)


def groups_are_linears_compiled(case: Grouped, same: Same) -> tuple[str, ...]:
    """The same of one graph for all rows and sizes of groups."""
    return _check(_compiled(), case, same)
