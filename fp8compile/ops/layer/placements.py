"""Placements: which shard of each tensor of a layer is on this rank.

A placement says how each tensor is laid out (`layouts`), what `Operands` need to know (`given`), what happens to a
product (`finish`, `reduced`) and how large a result is. Its fields are the arguments of the layer's op between the
tensors and the recipe, in this order. Methods that take ``ends`` also serve layers with groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import STACK, WHOLE, Quantized, TensorLayout
from fp8compile.ops.collectives import all_reduce, reduce_scatter
from fp8compile.ops.groups.grouped_mm import group_sum
from fp8compile.ops.layer.check_recipe_of_groups import check_cut_of_groups
from fp8compile.ops.layer.fsdp_gather_high_precision import reduced
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.multiply_over_ranks import Product, as_read
from fp8compile.ops.layer.operands import OUTPUT, Phase
from fp8compile.quantizers import Quantizer, Recipe

__all__ = [
    "CutOverGroup",
    "GroupsCutOverGroup",
    "GroupsOverFsdp",
    "GroupsOverFsdpForGradWeight",
    "KnownCodes",
    "KnownCodesOfGroups",
    "KnownForGradInput",
    "KnownForGradInputOfGroups",
    "Layouts",
    "Placement",
    "RowsOverFsdp",
    "RowsOverFsdpBase",
    "RowsOverFsdpForGradInput",
    "RowsOverFsdpForGradWeight",
    "SharedScale",
    "Whole",
    "WholeGroups",
    "sum_of_tokens",
]


class Layouts(NamedTuple):
    """The layout of each tensor of a layer on this rank."""

    input: TensorLayout
    weight: TensorLayout
    bias: TensorLayout
    output: TensorLayout


ALL_WHOLE = Layouts(WHOLE, WHOLE, WHOLE, WHOLE)


def _with_ends(ends: Tensor) -> Layouts:
    tokens = TensorLayout(ends=ends)
    return Layouts(tokens, STACK, WHOLE, tokens)


def sum_of_tokens(grad_output: Tensor) -> Tensor:
    """The gradient of a bias, (N,): the sum over all leading dims.

    It does not flatten these dims, so that a DTensor need not be redistributed.
    """
    tokens = grad_output if grad_output.ndim > 1 else grad_output.unsqueeze(0)  # -0.0 becomes 0.0, as in nn.Linear
    return tokens.sum(tuple(range(tokens.ndim - 1)))


@dataclass(slots=True)
class Placement:
    """Base of placements, which describe each tensor's shard on a rank; in this class every tensor is whole."""

    weight_name: ClassVar[str] = "weight"  # the name of the weight in the op's schema
    has_state: ClassVar[bool] = False
    has_codes: ClassVar[bool] = False  # whether the weight's codes are given, made before
    updates: ClassVar[tuple[str, ...]] = ()  # fields that the backward writes to

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError if a layer with this placement can't run with a recipe."""

    def layouts(self, ndim: int, ends: Tensor | None) -> Layouts:
        """The layout of each tensor. ``ndim`` is the number of dims of the tokens, with the dim of features."""
        return ALL_WHOLE if ends is None else _with_ends(ends)

    def given(self) -> dict[str, Any]:
        """Keyword arguments that this placement adds to `Operands`."""
        return {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the tokens."""
        return weight

    def finish(self, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """Turn this rank's product into its output or grad_input: reshape, and sum over ranks if it is a summand.

        ``tokens`` is the layout of the result, and ``shape`` is the shape of the left operand.
        """
        return product.local.view(*shape[:-1], product.local.shape[-1])

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        """Turn this rank's product into its part of the weight's gradient; by default the product itself."""
        return grad_weight

    def grad_bias(self, grad_output: Tensor, ends: Tensor | None, recipe: Recipe) -> Tensor:
        """The bias's gradient: (N,), or (E, N) with groups."""
        if ends is not None:
            return group_sum(grad_output, ends, recipe.gemm_config(OUTPUT))
        return sum_of_tokens(grad_output)

    def out_features(self, weight: Sequence[int], ends: Any) -> int:
        """Number of the output's features on this rank, from the shape of this rank's part of the weight."""
        return weight[-2]

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """Shape of the tokens that this rank multiplies, from the shape of the tokens that this rank has."""
        return tokens

    def tokens_of_output(self, tokens: Sequence[int]) -> Sequence[int]:
        """Leading sizes of this rank's output, from the leading sizes of its tokens."""
        return tokens

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """An uninitialized tensor like the output, for the op's fake kernel."""
        return x.new_empty((*x.shape[:-1], self.out_features(weight.shape, ends)))

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """An uninitialized tensor like grad_input, for the op's fake kernel."""
        return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[-1]))

    def empty_grad_weight(self, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        """An uninitialized tensor like grad_weight, for the op's fake kernel."""
        batch = () if ends is None else (ends.shape[0],)
        return grad_output.new_empty((*batch, grad_output.shape[-1], features))

    def for_grad_input(self, used: Tensor | None) -> Placement:
        """The placement of the op for grad_input.

        ``used`` are the multipliers of the forward; None without delayed scaling.
        """
        return self

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, for a weight of this dtype."""
        return self

    def for_keep(self) -> Placement:
        """The placement of the op that keeps codes of the input; by default the input is whole on this rank."""
        return Placement()

    def counts(self, layout: TensorLayout) -> bool:
        """Whether this rank counts its elements of a tensor in statistics; all ranks together count each one once."""
        return True

    def first_matrix(self) -> int:
        """Index of the first matrix of this rank's part of a stack."""
        return 0

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement without its tensors, and the tensors that autograd saves for grad_input."""
        names: tuple[str, ...] = self.__match_args__
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        tensors = tuple(value if isinstance(value, Tensor) else None for value in fields.values())
        without: dict[str, Any] = {name: None for name, value in fields.items() if isinstance(value, Tensor)}
        return (replace(self, **without), tensors) if without else (self, ())

    def restored(self, saved: Sequence[Tensor | None]) -> Placement:
        """The placement with the tensors that `saved` returned."""
        names: tuple[str, ...] = self.__match_args__
        own: dict[str, Any] = {n: value for n, value in zip(names, saved, strict=False) if value is not None}
        return replace(self, **own) if own else self


@dataclass(slots=True)
class Whole(Placement):
    """Every tensor is whole on this rank."""

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, because this op takes no state."""
        if not _compat.is_stand_in(recipe) and recipe.history():
            raise ValueError(
                "linear: the recipe has delayed scaling, whose scales come from the steps before, and no state is "
                "given. Keep one for each layer, fp8compile.DelayedState.initial(recipe), and pass state=; or use "
                "fp8compile.Linear or fp8compile.convert, which keep it in buffers."
            )


@dataclass(slots=True)
class SharedScale(Whole):
    """Every tensor is whole, and the weight shares its one scale with other weights, such as q with k and v.

    The scale comes from the amax of all these weights, which is an argument of the op.

    Attributes:
        outer_amax: The largest magnitude of all these weights, (1,) float32; None while autograd keeps it.
    """

    outer_amax: Tensor | None

    def given(self) -> dict[str, Any]:
        """Keyword arguments of `Operands`: the amax over all weights that share the outer scale."""
        return {"outer_amax": self.outer_amax}

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, which does not read the weight."""
        return Whole()


@dataclass(slots=True)
class WholeGroups(Placement):
    """A layer with groups of rows; every matrix is whole on this rank."""


# ---------------------------------------------------------------------------------- codes that are known


class _Known:
    """Mixin of placements whose weight is quantized already; ``batch`` is 1 for a stack of matrices, else 0."""

    __slots__ = ()

    has_codes: ClassVar[bool] = True
    batch: ClassVar[int] = 0

    # ``self: Any``, because subclasses define the fields
    def given(self: Any) -> dict[str, Any]:
        """Keyword arguments of `Operands`: the weight's codes for this product."""
        own = {name: getattr(self, name) for name in ("codes", "scale", "outer_scale", "quantizer")}
        return {"weight": Quantized(**own, layout=STACK if self.batch else WHOLE)}


@dataclass(slots=True)
class KnownForGradInput(_Known, Placement):
    """Placement of the op for grad_input of a weight whose codes are known; its fields hold the codes.

    Attributes:
        codes: The codes that grad_input reads, as in `Quantized`.
        scale: Scales of the codes' blocks.
        outer_scale: Second level of the codes' scales, or None.
        quantizer: The quantizer that made the codes.
    """

    codes: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    quantizer: Quantizer


@dataclass(slots=True)
class KnownForGradInputOfGroups(KnownForGradInput):
    """Placement like `KnownForGradInput`, whose weight is a stack of matrices."""

    batch: ClassVar[int] = 1


@dataclass(slots=True)
class KnownCodes(_Known, Placement):
    """Every tensor is whole, and the weight's codes are known: the layer keeps them together with the weight.

    The weight itself is an argument that gets a gradient; nothing reads its values. Tensors are None while autograd
    keeps them.

    Attributes:
        codes: The codes that the output reads, as in `Quantized`.
        scale: Scales of these codes' blocks.
        outer_scale: Second level of these codes' scales, or None.
        quantizer: The quantizer that made these codes.
        codes_for_grad_input: The codes that grad_input reads; they may be the same tensor.
        scale_for_grad_input: Scales of these codes' blocks.
        outer_scale_for_grad_input: Second level of these codes' scales, or None.
        quantizer_for_grad_input: The quantizer that made these codes.
    """

    of_grad_input: ClassVar[type[KnownForGradInput]] = KnownForGradInput

    codes: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    quantizer: Quantizer
    codes_for_grad_input: Tensor
    scale_for_grad_input: Tensor
    outer_scale_for_grad_input: Tensor | None
    quantizer_for_grad_input: Quantizer

    def for_grad_input(self, used: Tensor | None) -> Placement:
        """The placement of the op for grad_input, which holds grad_input's codes."""
        own = self.codes_for_grad_input, self.scale_for_grad_input, self.outer_scale_for_grad_input
        return self.of_grad_input(*own, self.quantizer_for_grad_input)

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, which does not read the weight."""
        return Placement()

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """This placement without tensors, and grad_input's codes, which autograd saves."""
        own = self.codes_for_grad_input, self.scale_for_grad_input, self.outer_scale_for_grad_input
        none: dict[str, Any] = {name: None for name in self.__match_args__ if not name.startswith("quantizer")}
        return replace(self, **none), own

    def restored(self, saved: Sequence[Tensor | None]) -> Placement:
        """This placement with grad_input's codes, as `saved` returned them."""
        names = "codes_for_grad_input", "scale_for_grad_input", "outer_scale_for_grad_input"
        own: dict[str, Any] = dict(zip(names, saved, strict=True))
        return replace(self, **own)


@dataclass(slots=True)
class KnownCodesOfGroups(KnownCodes):
    """Placement like `KnownCodes`, for a layer with groups of rows, whose weight is a stack of matrices."""

    of_grad_input: ClassVar[type[KnownForGradInput]] = KnownForGradInputOfGroups
    batch: ClassVar[int] = 1


# ---------------------------------------------------------------------------------- a group of ranks


@dataclass(slots=True)
class _OverGroup(Placement):
    """Base of placements in which the ranks of a group shard the weight.

    The op itself sends messages, so a graph holds the group's name, and never runs for another group. In a group of
    one rank nothing is sharded and nothing is sent.
    """

    # ``self: Any``, because this class reads fields that subclasses define, in the order of the ops' arguments
    def layouts(self: Any, ndim: int, ends: Tensor | None) -> Layouts:
        """The layout of each tensor. Each layout has one cut, because there is one group."""
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
        """Reshape the product; if it is a summand, sum it over ranks, and keep all tokens or this rank's tokens."""
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
        """The placement of the op that keeps codes: this placement, because ranks may shard the input."""
        return self

    def counts(self: Any, layout: TensorLayout) -> bool:
        """Whether statistics count this rank's elements: no other rank has them, or this rank is the group's first."""
        return any(layout.cuts) or self.rank == 0

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        """Make this rank's part of the weight's gradient contiguous."""
        return grad_weight.contiguous()


@dataclass(slots=True)
class GroupsCutOverGroup(_OverGroup):
    """Ranks of a group shard each matrix of a stack; every rank has all rows of the tokens.

    Attributes:
        weight_dim: The dim of the stack that is sharded. If 1 (out_features), the output's features are sharded too.
            If 2 (in_features), the input's features are sharded too, and the output is a sum over ranks.
        feature_sizes: Number of features on each rank.
        rank: This rank's number in the group.
        group: The name of the group.
    """

    weight_dim: int
    feature_sizes: Sequence[int]
    rank: int
    group: str

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError if the recipe has outer scales and several ranks share each matrix."""
        check_cut_of_groups(recipe, len(self.feature_sizes))


@dataclass(slots=True)
class CutOverGroup(_OverGroup):
    """Ranks of a group shard the weight, and possibly the tokens.

    Attributes:
        weight_dim: The dim of the weight that is sharded. If 0 (out_features), the output's features are sharded too.
            If 1 (in_features), the input's features are sharded too, and the output is a sum over ranks.
        feature_sizes: Number of features on each rank.
        rank: This rank's number in the group.
        group: The name of the group.
        sequence_dim: The leading dim along which tokens are sharded: those of the input if ``weight_dim`` is 0, of the
            output if it is 1. None if every rank has all tokens.
        sequence_sizes: Number of tokens on each rank along ``sequence_dim``.
    """

    weight_dim: int
    feature_sizes: Sequence[int]
    sequence_dim: int | None
    sequence_sizes: Sequence[int]
    rank: int
    group: str

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, because users call this op by functions, which keep no state."""
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
        """The bias's gradient: the sum over all tokens, including those of other ranks."""
        own = sum_of_tokens(grad_output)
        parts_of_tokens = self.weight_dim == 1 and self.sequence_dim is not None and len(self.feature_sizes) > 1
        return all_reduce(own, "sum", self.group) if parts_of_tokens else own

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """Shape of all tokens of the sequence, including those of other ranks."""
        if self.sequence_dim is None:
            return tokens
        shape = list(tokens)
        shape[self.sequence_dim] = sum(self.sequence_sizes)
        return shape

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """An uninitialized tensor like the output; it has all tokens if the output's features are sharded."""
        return self._empty(x, weight.shape[0], all_tokens=self.weight_dim == 0)

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """An uninitialized tensor like grad_input; it has all tokens if the input's features are sharded."""
        return self._empty(grad_output, weight.shape[1], all_tokens=self.weight_dim == 1)

    def _empty(self, like: Tensor, features: int, *, all_tokens: bool) -> Tensor:
        shape = [*like.shape[:-1], features]
        if self.sequence_dim is not None:
            shape[self.sequence_dim] = sum(self.sequence_sizes) if all_tokens else self.sequence_sizes[self.rank]
        return like.new_empty(shape)


# ---------------------------------------------------------------------------------- FSDP in the graph


# forward and backward quantize the same shard: one node, so that the backward finds the forward's scales
_in_dtype = inductor.once_a_graph(Tensor.to)


@dataclass(slots=True)
class _OverFsdp(Placement):
    """Base of placements whose weight FSDP shards along the first dim: by rows of a matrix, or by matrices of a stack.

    Codes and scales are those of the whole weight in the dtype of the tokens. The shard is saved for the backward.
    """

    weight_name: ClassVar[str] = "shard"

    def given(self: Any) -> dict[str, Any]:
        """Keyword arguments of `Operands`: the rows that each rank has."""
        return {"rows": self.rows}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The shard in the dtype of the tokens; it is quantized and gathered in this dtype."""
        return _in_dtype(weight, dtype)

    def out_features(self: Any, weight: Sequence[int], ends: Any) -> int:
        """Number of output features.

        A matrix has the rows of all ranks' shards. A stack has the size of dim -2, because ranks shard only its first
        dim.
        """
        return sum(self.rows.sizes) if ends is None else weight[-2]


@dataclass(slots=True)
class _OverFsdpForGradWeight(Placement):
    def reduced(self: Any, grad_weight: Tensor, phase: Phase) -> Tensor:
        """This rank's part of the weight's gradient, averaged over ranks.

        If the reduction runs in another dtype than the product, the product is rounded to its own dtype first.
        """
        if grad_weight.dtype != getattr(torch, self.rows.reduce_dtype):
            grad_weight = as_read(grad_weight, phase)
        return reduced(grad_weight, self.dtype, self.rows).contiguous()

    def empty_grad_weight(self: Any, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        """An uninitialized tensor like grad_weight, which has the shape and dtype of this rank's shard."""
        own = self.rows.sizes[self.rows.rank]
        shape = (own, features) if ends is None else (own, grad_output.shape[1], features)
        return grad_output.new_empty(shape, dtype=self.dtype)


@dataclass(slots=True)
class RowsOverFsdpBase(_OverFsdp):
    """Base of placements whose weight FSDP shards by rows, with or without the fields of delayed scaling."""

    def given(self: Any) -> dict[str, Any]:
        """Keyword arguments of `Operands`: the rows that each rank has, and the weight's amax."""
        return {"rows": self.rows, "weight_amax": self.amax}

    def saved(self: Any) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """This placement without amaxes, and the amax for grad_input, which autograd saves."""
        return replace(self, amax=None, amax_for_grad_input=None), (self.amax_for_grad_input,)

    def restored(self: Any, saved: Sequence[Tensor | None]) -> Placement:
        """This placement with the saved amax for grad_input."""
        return replace(self, amax_for_grad_input=saved[0])

    def for_grad_input(self: Any, used: Tensor | None) -> Placement:
        """The placement of the op for grad_input, which holds the weight's amax for grad_input."""
        return RowsOverFsdpForGradInput(self.amax_for_grad_input, used, self.rows)

    def for_grad_weight(self: Any, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, which holds the dtype of the shard."""
        return RowsOverFsdpForGradWeight(used, dtype, self.rows)


@dataclass(slots=True)
class RowsOverFsdp(RowsOverFsdpBase):
    """Placement of a weight that FSDP shards by rows.

    Attributes:
        amax: Amax of the whole weight for the output, if ranks have exchanged the amaxes of all layers at once. If
            None, the op exchanges it.
        amax_for_grad_input: Amax of the whole weight for grad_input, or None.
        rows: The rows that each rank has.
    """

    amax: Tensor | None
    amax_for_grad_input: Tensor | None
    rows: Rows

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, which fsdp_delayed_linear takes."""
        if not _compat.is_stand_in(recipe) and recipe.history():
            raise ValueError(
                "fsdp_linear: the recipe has delayed scaling, whose state this op has no place for. Take "
                "fsdp_delayed_linear."
            )


@dataclass(slots=True)
class RowsOverFsdpForGradInput(_OverFsdp):
    """Placement of the op for grad_input of a weight that FSDP shards by rows.

    Attributes:
        amax: Amax of the whole weight for grad_input, or None.
        multiplier: Multipliers that the forward used, (3,) float32; None without delayed scaling.
        rows: The rows that each rank has.
    """

    amax: Tensor | None
    multiplier: Tensor | None
    rows: Rows

    def given(self) -> dict[str, Any]:
        """Keyword arguments of `Operands`: each rank's rows, the weight's amax, and the forward's multipliers."""
        return {"rows": self.rows, "weight_amax": self.amax, "multiplier": self.multiplier}


@dataclass(slots=True)
class RowsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """Placement of the op for grad_weight of a weight that FSDP shards by rows.

    Attributes:
        multiplier: Multipliers that the forward used, (3,) float32; None without delayed scaling.
        dtype: Dtype of the shard, and of its gradient.
        rows: The rows that each rank has.
    """

    multiplier: Tensor | None
    dtype: torch.dtype
    rows: Rows

    def given(self) -> dict[str, Any]:
        """Keyword arguments of `Operands`: the multipliers that the forward used, None without delayed scaling."""
        return {"multiplier": self.multiplier}


@dataclass(slots=True)
class GroupsOverFsdp(_OverFsdp):
    """Placement of a stack that FSDP shards by whole matrices, so ranks exchange no amax."""

    rows: Rows

    def first_matrix(self) -> int:
        """Index of the first matrix that this rank has."""
        return sum(self.rows.sizes[: self.rows.rank])

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """The placement of the op for grad_weight, which holds the dtype of the shard."""
        return GroupsOverFsdpForGradWeight(dtype, self.rows)


@dataclass(slots=True)
class GroupsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """Placement of the op for grad_weight of a stack that FSDP shards; ``dtype`` is that of the shard."""

    dtype: torch.dtype
    rows: Rows
