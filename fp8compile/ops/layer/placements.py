"""Placements: where the tensors of a layer lie. An op's arguments between its tensors and its recipe are one.

    Whole          every tensor is whole on this rank
    CutOverGroup   ranks of a group share the weight's features, and maybe the tokens
    RowsOverFsdp   ranks of FSDP share the weight's first dim, and gather it as codes

A placement answers how each tensor lies (`layouts`), what `Operands` need to know (`given`), what happens to a product
(`finish`, `reduced`) and how large a result is. Its fields are the ops' arguments, in order. It is asked with the ends
of groups too: their matrices are a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import STACK, WHOLE, TensorLayout
from fp8compile.ops.collectives import all_reduce, reduce_scatter
from fp8compile.ops.groups.grouped_mm import group_sum
from fp8compile.ops.layer.check_groups import check_cut_of_groups
from fp8compile.ops.layer.fsdp_gather import reduced
from fp8compile.ops.layer.operands import OUTPUT, Phase
from fp8compile.ops.layer.products import Product, as_read
from fp8compile.ops.layer.rows import Rows
from fp8compile.quantizers import Recipe

__all__ = [
    "CutOverGroup",
    "GroupsCutOverGroup",
    "GroupsOverFsdp",
    "GroupsOverFsdpForGradWeight",
    "Layouts",
    "Placement",
    "RowsOverFsdp",
    "RowsOverFsdpBase",
    "RowsOverFsdpForGradInput",
    "RowsOverFsdpForGradWeight",
    "Whole",
    "WholeGroups",
    "sum_of_tokens",
]


class Layouts(NamedTuple):
    """How each tensor of a layer lies."""

    input: TensorLayout
    weight: TensorLayout
    bias: TensorLayout
    output: TensorLayout


ALL_WHOLE = Layouts(WHOLE, WHOLE, WHOLE, WHOLE)


def _with_ends(ends: Tensor) -> Layouts:
    tokens = TensorLayout(ends=ends)
    return Layouts(tokens, STACK, WHOLE, tokens)


def sum_of_tokens(grad_output: Tensor) -> Tensor:
    """The gradient of a bias, (N,). It sums dim by dim, so that a tensor over ranks need not be flattened."""
    return grad_output.sum(tuple(range(grad_output.ndim - 1))) if grad_output.ndim > 1 else grad_output.clone()


@dataclass(slots=True)
class Placement:
    """Base of placements; by itself a layer whose tensors are whole."""

    weight_name: ClassVar[str] = "weight"  # the name of the weight in the op's schema
    has_state: ClassVar[bool] = False
    updates: ClassVar[tuple[str, ...]] = ()  # fields that the backward writes to

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError if a layer with this placement can't run by a recipe."""

    def layouts(self, ndim: int, ends: Tensor | None) -> Layouts:
        """How each tensor lies.

        Args:
            ndim: Number of dims of the tokens, features included.
            ends: Ends of the groups of tokens, or None.
        """
        return ALL_WHOLE if ends is None else _with_ends(ends)

    def given(self) -> dict[str, Any]:
        """Arguments of `Operands`."""
        return {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the tokens."""
        return weight

    def finish(self, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """Turn this rank's product into its output or grad_input: reshape, and sum over ranks if it is a summand.

        Args:
            product: This rank's product.
            tokens: Layout of the result.
            shape: Shape of the left operand.
        """
        return product.local.view(*shape[:-1], product.local.shape[-1])

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        """Turn this rank's product into its part of the weight's gradient."""
        return grad_weight

    def grad_bias(self, grad_output: Tensor, ends: Tensor | None, recipe: Recipe) -> Tensor:
        """The bias's gradient: (N,), or (E, N) with groups."""
        if ends is not None:
            return group_sum(grad_output, ends, recipe.gemm_config(OUTPUT))
        return sum_of_tokens(grad_output)

    def out_features(self, weight: Sequence[int], ends: Any) -> int:
        """Columns of a product, from the shape of this rank's part of the weight."""
        return weight[-2]

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """Shape of the tokens that this rank multiplies, from the shape of the tokens that it has."""
        return tokens

    def tokens_of_output(self, tokens: Sequence[int]) -> Sequence[int]:
        """Leading sizes of this rank's output, from those of its tokens."""
        return tokens

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """An output without values, for tracing."""
        return x.new_empty((*x.shape[:-1], self.out_features(weight.shape, ends)))

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """A grad_input without values, for tracing."""
        return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[-1]))

    def empty_grad_weight(self, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        """A grad_weight without values, for tracing."""
        batch = () if ends is None else (ends.shape[0],)
        return grad_output.new_empty((*batch, grad_output.shape[-1], features))

    def for_grad_input(self, used: Tensor | None) -> Placement:
        """The placement of the op for grad_input.

        Args:
            used: The multipliers that the forward used, if there are some.
        """
        return self

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, for a weight of this dtype."""
        return self

    def for_keep(self) -> Placement:
        """The placement of the op that keeps codes of the input; the input is whole."""
        return Placement()

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """The placement without its tensors, which only autograd may keep, and the tensors that grad_input needs."""
        return self, ()

    def restored(self, saved: Sequence[Tensor | None]) -> Placement:
        """The placement with the tensors that `saved` returned."""
        return self


@dataclass(slots=True)
class Whole(Placement):
    """Every tensor is whole on this rank."""

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Refuse delayed scaling, whose scales are a state."""
        if not _compat.is_stand_in(recipe) and recipe.history():
            raise ValueError(
                "linear: the recipe has delayed scaling, whose scales come from the steps before, and no state is "
                "given. Keep one for each layer, fp8compile.DelayedState.initial(recipe), and pass state=; or use "
                "fp8compile.Linear or fp8compile.convert, which keep it in buffers."
            )


@dataclass(slots=True)
class WholeGroups(Placement):
    """Rows of groups; every matrix is whole on this rank."""


# ---------------------------------------------------------------------------------- a group of ranks


@dataclass(slots=True)
class _OverGroup(Placement):
    """Base of layers whose weight the ranks of a group share.

    Messages are part of the op, so its graph holds the group's name, and never runs for another group. In a group of
    one rank nothing is cut and nothing sent.
    """

    # ``self: Any``: the fields that bases read are their subclasses', in the order of the ops' arguments
    def layouts(self: Any, ndim: int, ends: Tensor | None) -> Layouts:
        """How each tensor lies; there is one group, so each has one cut."""
        if len(self.feature_sizes) == 1:
            return ALL_WHOLE if ends is None else _with_ends(ends)
        features = DimSharding(self.group, self.rank, ndim - 1, tuple(self.feature_sizes))
        cut_weight = replace(features, dim=self.weight_dim)
        weight = TensorLayout((cut_weight,), batch=0 if ends is None else 1)
        whole, cut = (TensorLayout((each,), ends=ends) for each in (self._tokens(features), features))
        if self._cuts_out_features(ends):
            return Layouts(whole, weight, TensorLayout((cut_weight,)), cut)
        return Layouts(cut, weight, TensorLayout((None,)), whole)

    def _tokens(self, features: DimSharding) -> DimSharding | None:
        return None

    def _cuts_out_features(self: Any, ends: Tensor | None) -> bool:
        return self.weight_dim == (0 if ends is None else 1)

    def finish(self: Any, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """The product; if it is a summand, the sum over ranks, for all tokens or for this rank's."""
        if not tokens.cuts:
            return Placement.finish(self, product, tokens, shape)
        (step,), (cut,) = product.steps, tokens.cuts
        local = product.local.view(*product.shape[:-1], product.local.shape[1])
        if step.out == "sum" and cut is None:
            return all_reduce(local, "sum", self.group)
        if step.out == "sum" and cut is not None:
            local = reduce_scatter(local, "sum", cut.dim, cut.sizes, cut.rank, self.group)
        return local.contiguous()

    def for_keep(self) -> Placement:
        """The placement itself, because ranks share the input or its features."""
        return self

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        """This rank's part, contiguous."""
        return grad_weight.contiguous()


@dataclass(slots=True)
class GroupsCutOverGroup(_OverGroup):
    """Ranks share each matrix of a stack; every rank has all rows.

    Attributes:
        weight_dim: The dim of the stack that is cut. If 1 (out_features), the output's features are cut too; if 2
            (in_features), the input's features are, and the output is a sum over ranks.
        feature_sizes: Features that each rank has.
        rank: This rank's number in the group.
        group: The name of the group.
    """

    weight_dim: int
    feature_sizes: Sequence[int]
    rank: int
    group: str

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Refuse an outer scale of a matrix that several ranks have."""
        check_cut_of_groups(recipe, len(self.feature_sizes))


@dataclass(slots=True)
class CutOverGroup(_OverGroup):
    """Ranks share the weight, and maybe the tokens.

    Attributes:
        weight_dim: The dim of the weight that is cut. If 0 (out_features), the output's features are cut too; if 1
            (in_features), the input's features are, and the output is a sum over ranks.
        feature_sizes: Features that each rank has.
        rank: This rank's number in the group.
        group: The name of the group.
        sequence_dim: The leading dim that is cut in tokens whose features are whole; None: every rank has all tokens.
        sequence_sizes: Tokens that each rank has along that dim.
    """

    weight_dim: int
    feature_sizes: Sequence[int]
    sequence_dim: int | None
    sequence_sizes: Sequence[int]
    rank: int
    group: str

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Refuse delayed scaling, whose state a function has no place for."""
        if not _compat.is_stand_in(recipe) and recipe.history():
            raise ValueError(
                "sharded_linear: the recipe has delayed scaling, whose state is kept by layers, and this one is a "
                "function. Take a recipe with current scaling, or a fp8compile.Linear on DTensors."
            )

    def _tokens(self, features: DimSharding) -> DimSharding | None:
        if self.sequence_dim is None:
            return None
        return replace(features, dim=self.sequence_dim, sizes=tuple(self.sequence_sizes))

    def grad_bias(self, grad_output: Tensor, ends: Tensor | None, recipe: Recipe) -> Tensor:
        """The sum over all tokens, also those of other ranks."""
        own = sum_of_tokens(grad_output)
        parts_of_tokens = self.weight_dim == 1 and self.sequence_dim is not None and len(self.feature_sizes) > 1
        return all_reduce(own, "sum", self.group) if parts_of_tokens else own

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """All tokens of the sequence, also those of other ranks."""
        if self.sequence_dim is None:
            return tokens
        shape = list(tokens)
        shape[self.sequence_dim] = sum(self.sequence_sizes)
        return shape

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """It has all tokens if the output's features are cut."""
        return self._empty(x, weight.shape[0], all_tokens=self.weight_dim == 0)

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """It has all tokens if the input's features are cut."""
        return self._empty(grad_output, weight.shape[1], all_tokens=self.weight_dim == 1)

    def _empty(self, like: Tensor, features: int, *, all_tokens: bool) -> Tensor:
        shape = [*like.shape[:-1], features]
        if self.sequence_dim is not None:
            shape[self.sequence_dim] = sum(self.sequence_sizes) if all_tokens else self.sequence_sizes[self.rank]
        return like.new_empty(shape)


# ---------------------------------------------------------------------------------- FSDP in the graph


@dataclass(slots=True)
class _OverFsdp(Placement):
    """Base of layers whose weight FSDP cuts along the first dim: by rows of a matrix, or by matrices of a stack.

    Codes and scales are the same as in a layer on the whole weight, in the dtype of the tokens. The shard is saved for
    backward. A product that the recipe leaves in high precision gathers the weight in that dtype.
    """

    weight_name: ClassVar[str] = "shard"

    def given(self: Any) -> dict[str, Any]:
        """The rows that each rank has."""
        return {"rows": self.rows}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The shard in the dtype of the tokens, in which it is quantized and gathered."""
        return weight.to(dtype)

    def out_features(self: Any, weight: Sequence[int], ends: Any) -> int:
        """Rows of the weight on all ranks together; of a stack its own."""
        return sum(self.rows.sizes) if ends is None else weight[-2]


@dataclass(slots=True)
class _OverFsdpForGradWeight(Placement):
    def reduced(self: Any, grad_weight: Tensor, phase: Phase) -> Tensor:
        """This rank's part of the mean over ranks; the product is rounded before a reduction in another dtype."""
        if grad_weight.dtype != getattr(torch, self.rows.reduce_dtype):
            grad_weight = as_read(grad_weight, phase)
        return reduced(grad_weight, self.dtype, self.rows).contiguous()

    def empty_grad_weight(self: Any, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        """It has this rank's part of the weight."""
        own = self.rows.sizes[self.rows.rank]
        shape = (own, features) if ends is None else (own, grad_output.shape[1], features)
        return grad_output.new_empty(shape, dtype=self.dtype)


@dataclass(slots=True)
class RowsOverFsdpBase(_OverFsdp):
    """Base of layers whose weight FSDP cuts by rows, with or without the fields of delayed scaling."""

    def given(self: Any) -> dict[str, Any]:
        """The rows that each rank has, and the amax."""
        return {"rows": self.rows, "weight_amax": self.amax}

    def saved(self: Any) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """The placement without amaxes, and the amax for grad_input."""
        return replace(self, amax=None, amax_for_grad_input=None), (self.amax_for_grad_input,)

    def restored(self: Any, saved: Sequence[Tensor | None]) -> Placement:
        """The placement with the amax for grad_input."""
        return replace(self, amax_for_grad_input=saved[0])

    def for_grad_input(self: Any, used: Tensor | None) -> Placement:
        """The placement with grad_input's amax."""
        return RowsOverFsdpForGradInput(self.amax_for_grad_input, used, self.rows)

    def for_grad_weight(self: Any, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement with the dtype of the shard."""
        return RowsOverFsdpForGradWeight(used, dtype, self.rows)


@dataclass(slots=True)
class RowsOverFsdp(RowsOverFsdpBase):
    """A weight that FSDP cuts by rows.

    Attributes:
        amax: Amax of the whole weight for the output, if ranks have exchanged those of all layers at once; None: the
            op exchanges it.
        amax_for_grad_input: The same for grad_input.
        rows: The rows that each rank has.
    """

    amax: Tensor | None
    amax_for_grad_input: Tensor | None
    rows: Rows

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Refuse delayed scaling, which has an op of its own."""
        if not _compat.is_stand_in(recipe) and recipe.history():
            raise ValueError(
                "fsdp_linear: the recipe has delayed scaling, whose state this op has no place for. Take "
                "fsdp_delayed_linear."
            )


@dataclass(slots=True)
class RowsOverFsdpForGradInput(_OverFsdp):
    """The arguments of `RowsOverFsdp`'s grad_input: ``multiplier`` that the forward used, for delayed scaling."""

    amax: Tensor | None
    multiplier: Tensor | None
    rows: Rows

    def given(self) -> dict[str, Any]:
        """The rows that each rank has, the amax and the multipliers."""
        return {"rows": self.rows, "weight_amax": self.amax, "multiplier": self.multiplier}


@dataclass(slots=True)
class RowsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """The arguments of `RowsOverFsdp`'s grad_weight: ``dtype`` of the shard."""

    multiplier: Tensor | None
    dtype: torch.dtype
    rows: Rows

    def given(self) -> dict[str, Any]:
        """The multipliers."""
        return {"multiplier": self.multiplier}


@dataclass(slots=True)
class GroupsOverFsdp(_OverFsdp):
    """FSDP cuts a stack by matrices: each is whole on one rank, so no amax is sent."""

    rows: Rows

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement with the dtype of the shard."""
        return GroupsOverFsdpForGradWeight(dtype, self.rows)


@dataclass(slots=True)
class GroupsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """The arguments of `GroupsOverFsdp`'s grad_weight: ``dtype`` of the shard."""

    dtype: torch.dtype
    rows: Rows
