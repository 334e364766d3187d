"""Placements: which shard of each tensor of a layer is on this rank.

A placement defines the layouts of the tensors, the reductions after a GEMM, and the shapes of the results. Its fields
are arguments of the layer's op, between the tensors and the recipe. Methods that take ``ends``, the ends of groups of
rows, also serve layers with groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8compile import inductor
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
    """The layouts of a layer's tensors: whether they are stacked or in groups, and how ranks shard them."""

    input: TensorLayout
    weight: TensorLayout
    bias: TensorLayout
    output: TensorLayout


ALL_WHOLE = Layouts(WHOLE, WHOLE, WHOLE, WHOLE)


def _with_ends(ends: Tensor) -> Layouts:
    tokens = TensorLayout(ends=ends)
    return Layouts(tokens, STACK, WHOLE, tokens)


def sum_of_tokens(grad_output: Tensor) -> Tensor:
    """Sum grad_output, (..., N), over all leading dims: the gradient of a bias, (N,).

    The leading dims are not flattened, so that a DTensor need not be redistributed.
    """
    tokens = grad_output if grad_output.ndim > 1 else grad_output.unsqueeze(0)  # -0.0 becomes 0.0, as in nn.Linear
    return tokens.sum(tuple(range(tokens.ndim - 1)))


@dataclass(slots=True)
class Placement:
    """Base class of placements: which shard of each tensor this rank has; by default tensors are whole."""

    weight_name: ClassVar[str] = "weight"  # the name of the weight in the op's schema
    has_state: ClassVar[bool] = False
    has_codes: ClassVar[bool] = False  # whether the weight's codes are given, made before
    updates: ClassVar[tuple[str, ...]] = ()  # fields that the backward writes to

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError if a layer with this placement can't run with a recipe."""

    def layouts(self, ndim: int, ends: Tensor | None) -> Layouts:
        """Return how input, weight and output are sharded; ``ndim`` is the input's number of dims.

        ``ends`` has the last row of each expert, plus one; None for a layer without experts.
        """
        return ALL_WHOLE if ends is None else _with_ends(ends)

    def given(self) -> dict[str, Any]:
        """Return keyword arguments that this placement adds to a GEMM's `Operands`, such as amaxes; default: none."""
        return {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in ``dtype``, the dtype of the tokens; by default the weight unchanged."""
        return weight

    def finish(self, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """Turn a rank's product into this rank's output or grad_input: reshape, and sum over ranks if needed.

        ``tokens`` is the layout of the result, and ``shape`` is the shape of the left operand.
        """
        if len(shape) == 2:
            return product.local  # a view costs an eager call 3 us
        return product.local.view(*shape[:-1], product.local.shape[-1])

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        """Turn a rank's product into this rank's shard of grad_weight; by default, the same tensor."""
        return grad_weight

    def grad_bias(self, grad_output: Tensor, ends: Tensor | None, recipe: Recipe) -> Tensor:
        """Return the bias's gradient: (N,), or (E, N) for E groups, whose ends are ``ends``."""
        if ends is not None:
            return group_sum(grad_output, ends, recipe.gemm_config(OUTPUT))
        return sum_of_tokens(grad_output)

    def out_features(self, weight: Sequence[int], ends: Any) -> int:
        """Return the number of the output's features on this rank; ``weight`` is the shape of its shard."""
        return weight[-2]

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the shape of the tokens that this rank multiplies, from their shape before ranks gather them."""
        return tokens

    def tokens_of_output(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the leading sizes of this rank's output, from the leading sizes of its input."""
        return tokens

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """Make an uninitialized tensor like the output, for the op's fake kernel."""
        return x.new_empty((*x.shape[:-1], self.out_features(weight.shape, ends)))

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """Make an uninitialized tensor like grad_input, for the op's fake kernel."""
        return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[-1]))

    def empty_grad_weight(self, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        """Make an uninitialized tensor like grad_weight, with ``features`` columns, for the op's fake kernel."""
        batch = () if ends is None else (ends.shape[0],)
        return grad_output.new_empty((*batch, grad_output.shape[-1], features))

    def for_grad_input(self, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_input; ``used`` are the forward's multipliers (delayed scaling)."""
        return self

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_weight; ``used`` are the forward's multipliers (delayed scaling)."""
        return self

    def for_keep(self) -> Placement:
        """Return the placement of the op that keeps codes of the input; by default one in which the input is whole."""
        return Placement()

    def counts(self, layout: TensorLayout) -> bool:
        """Whether this rank counts its elements in statistics; together the ranks count each element once."""
        return True

    def first_matrix(self) -> int:
        """Return the index of this rank's first matrix among the stacked matrices of all ranks."""
        return 0

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement without its tensors, and its tensors apart, which autograd saves for grad_input."""
        names: tuple[str, ...] = self.__match_args__
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        tensors = tuple(value if isinstance(value, Tensor) else None for value in fields.values())
        without: dict[str, Any] = {name: None for name, value in fields.items() if isinstance(value, Tensor)}
        return (replace(self, **without), tensors) if without else (self, ())

    def restored(self, saved: Sequence[Tensor | None]) -> Placement:
        """Return this placement with the tensors ``saved``, which its method `saved` returned."""
        names: tuple[str, ...] = self.__match_args__
        own: dict[str, Any] = {n: value for n, value in zip(names, saved, strict=False) if value is not None}
        return replace(self, **own) if own else self


@dataclass(slots=True)
class Whole(Placement):
    """Placement of a layer without delayed scaling whose tensors are all whole on this rank."""

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, because this op takes no state."""
        if recipe.history():
            raise ValueError(
                "linear: the recipe has delayed scaling, whose scales come from the steps before, and no state is "
                "given. Keep one for each layer, fp8compile.DelayedState.initial(recipe), and pass state=; or use "
                "fp8compile.Linear or fp8compile.convert, which keep it in buffers."
            )


@dataclass(slots=True)
class SharedScale(Whole):
    """Placement of a layer whose weight shares its one scale with other weights, such as q with k and v.

    Attributes:
        outer_amax: The amax over all these weights, (1,) float32; None between forward and backward, when
            autograd's saved tensors hold it.
    """

    outer_amax: Tensor | None

    def given(self) -> dict[str, Any]:
        """Return a keyword argument of `Operands`: the amax over all weights that share the scale."""
        return {"outer_amax": self.outer_amax}

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return a placement without the amax, because grad_weight does not read the weight."""
        return Whole()


@dataclass(slots=True)
class WholeGroups(Placement):
    """Placement of a layer with groups of rows; every group's matrix is whole on this rank."""


# ---------------------------------------------------------------------------------- codes that are known


class _Known:
    """Mixin of placements that hold the codes of a weight; ``batch`` is 1 for stacked weights of experts, else 0."""

    __slots__ = ()

    has_codes: ClassVar[bool] = True
    batch: ClassVar[int] = 0

    # ``self: Any``, because subclasses define the fields
    def given(self: Any) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("codes", "scale", "outer_scale", "quantizer")}
        return {"weight": Quantized(**own, layout=STACK if self.batch else WHOLE)}


@dataclass(slots=True)
class KnownForGradInput(_Known, Placement):
    """Placement of the op for grad_input with a weight that was quantized before: the fields are codes and scales."""

    codes: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    quantizer: Quantizer


@dataclass(slots=True)
class KnownForGradInputOfGroups(KnownForGradInput):
    """Placement like `KnownForGradInput`, for stacked weights of experts."""

    batch: ClassVar[int] = 1


@dataclass(slots=True)
class KnownCodes(_Known, Placement):
    """Placement of a layer that keeps codes together with the weight; every tensor is whole.

    The weight is an argument only to get a gradient. The first four fields are its codes, scales and quantizer for the
    output, the fields ``..._for_grad_input`` those for grad_input, perhaps the same tensors. Between forward and
    backward the tensors are None, and autograd's saved tensors hold those for grad_input.
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
        """Return the placement of the op for grad_input, with the codes that grad_input reads."""
        own = self.codes_for_grad_input, self.scale_for_grad_input, self.outer_scale_for_grad_input
        return self.of_grad_input(*own, self.quantizer_for_grad_input)

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return a plain `Placement`: grad_weight reads no weight, so it needs none of these codes."""
        return Placement()

    def saved(self) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement without tensors, and what autograd saves: grad_input's codes and scales."""
        own = self.codes_for_grad_input, self.scale_for_grad_input, self.outer_scale_for_grad_input
        none: dict[str, Any] = {name: None for name in self.__match_args__ if not name.startswith("quantizer")}
        return replace(self, **none), own

    def restored(self, saved: Sequence[Tensor | None]) -> Placement:
        """Return this placement with ``saved``, the codes and scales for grad_input."""
        names = "codes_for_grad_input", "scale_for_grad_input", "outer_scale_for_grad_input"
        own: dict[str, Any] = dict(zip(names, saved, strict=True))
        return replace(self, **own)


@dataclass(slots=True)
class KnownCodesOfGroups(KnownCodes):
    """Placement like `KnownCodes`, for a layer with groups of rows and stacked weights of experts."""

    of_grad_input: ClassVar[type[KnownForGradInput]] = KnownForGradInputOfGroups
    batch: ClassVar[int] = 1


# ---------------------------------------------------------------------------------- a group of ranks


@dataclass(slots=True)
class _OverGroup(Placement):
    """Base of placements in which the ranks of a group shard the weight.

    The op itself calls collectives, so a graph contains the group's name and serves this group only. If the group
    has one rank, nothing is sharded or sent.
    """

    # ``self: Any``, because this class reads fields that subclasses define, in the order of the ops' arguments
    def layouts(self: Any, ndim: int, ends: Tensor | None) -> Layouts:
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
        return self

    def counts(self: Any, layout: TensorLayout) -> bool:
        return any(layout.cuts) or self.rank == 0

    def reduced(self, grad_weight: Tensor, phase: Phase) -> Tensor:
        return grad_weight.contiguous()


@dataclass(slots=True)
class GroupsCutOverGroup(_OverGroup):
    """Placement in which ranks shard every matrix of stacked weights; every rank has all rows of the tokens.

    Attributes:
        weight_dim: The dim of the stacked weights that is sharded. If 1 (out_features), the output's features are
            sharded too. If 2 (in_features), the input's features are sharded too, and the output is a sum over ranks.
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
    """Placement in which the ranks of a group shard the weight, and possibly the tokens.

    Attributes:
        weight_dim: The dim of the weight that is sharded. If 0 (out_features), the output's features are sharded too.
            If 1 (in_features), the input's features are sharded too, and the output is a sum over ranks.
        feature_sizes: Number of features on each rank.
        rank: This rank's number in the group.
        group: The name of the group.
        sequence_dim: The leading dim along which tokens are sharded: the input's tokens if ``weight_dim`` is 0, the
            output's if it is 1. None if every rank has all tokens.
        sequence_sizes: Number of tokens on each rank along ``sequence_dim``.
    """

    weight_dim: int
    feature_sizes: Sequence[int]
    sequence_dim: int | None
    sequence_sizes: Sequence[int]
    rank: int
    group: str

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, because the op takes no state."""
        if recipe.history():
            raise ValueError(
                "sharded_linear: the recipe has delayed scaling, whose state is kept by layers, and this one is a "
                "function. Take a recipe with current scaling, or a fp8compile.Linear on DTensors."
            )

    def _tokens(self, features: DimSharding) -> DimSharding | None:
        if self.sequence_dim is None:
            return None
        return replace(features, dim=self.sequence_dim, sizes=tuple(self.sequence_sizes))

    def grad_bias(self, grad_output: Tensor, ends: Tensor | None, recipe: Recipe) -> Tensor:
        """Return the bias's gradient, summed over the tokens of all ranks."""
        own = sum_of_tokens(grad_output)
        parts_of_tokens = self.weight_dim == 1 and self.sequence_dim is not None and len(self.feature_sizes) > 1
        return all_reduce(own, "sum", self.group) if parts_of_tokens else own

    def tokens_multiplied(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the shape of all ranks' tokens, from the shape of this rank's tokens."""
        if self.sequence_dim is None:
            return tokens
        shape = list(tokens)
        shape[self.sequence_dim] = sum(self.sequence_sizes)
        return shape

    def empty_output(self, x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
        """Make an uninitialized tensor like the output; with all tokens if ranks shard the output's features."""
        return self._empty(x, weight.shape[0], all_tokens=self.weight_dim == 0)

    def empty_grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """Make an uninitialized tensor like grad_input; with all tokens if ranks shard the input's features."""
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
    """Base of placements whose weight FSDP shards along dim 0: by rows, or stacked weights by matrices.

    Each rank casts its shard to the dtype of the tokens, and quantizes it to the codes that the whole weight would
    have. The shard is saved for the backward.
    """

    weight_name: ClassVar[str] = "shard"

    def given(self: Any) -> dict[str, Any]:
        return {"rows": self.rows}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return _in_dtype(weight, dtype)

    def out_features(self: Any, weight: Sequence[int], ends: Any) -> int:
        return sum(self.rows.sizes) if ends is None else weight[-2]


@dataclass(slots=True)
class _OverFsdpForGradWeight(Placement):
    def reduced(self: Any, grad_weight: Tensor, phase: Phase) -> Tensor:
        if grad_weight.dtype != getattr(torch, self.rows.reduce_dtype):
            grad_weight = as_read(grad_weight, phase)
        return reduced(grad_weight, self.dtype, self.rows).contiguous()

    def empty_grad_weight(self: Any, grad_output: Tensor, features: int, ends: Tensor | None) -> Tensor:
        own = self.rows.sizes[self.rows.rank]
        shape = (own, features) if ends is None else (own, grad_output.shape[1], features)
        return grad_output.new_empty(shape, dtype=self.dtype)


@dataclass(slots=True)
class RowsOverFsdpBase(_OverFsdp):
    """Base of placements whose weight FSDP shards by rows, with or without delayed scaling."""

    def given(self: Any) -> dict[str, Any]:
        """Return keyword arguments of `Operands`: the rows on each rank, and the whole weight's amaxes."""
        return {"rows": self.rows, "weight_amax": self.amax}

    def saved(self: Any) -> tuple[Placement, tuple[Tensor | None, ...]]:
        """Return this placement without amaxes, and the amaxes for grad_input, which autograd saves."""
        return replace(self, amax=None, amax_for_grad_input=None), (self.amax_for_grad_input,)

    def restored(self: Any, saved: Sequence[Tensor | None]) -> Placement:
        """Return this placement with ``saved``, the amaxes for grad_input."""
        return replace(self, amax_for_grad_input=saved[0])

    def for_grad_input(self: Any, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_input, with the weight's amaxes and ``used``, the multipliers."""
        return RowsOverFsdpForGradInput(self.amax_for_grad_input, used, self.rows)

    def for_grad_weight(self: Any, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_weight, with the shard's dtype and ``used``, the multipliers."""
        return RowsOverFsdpForGradWeight(used, dtype, self.rows)


@dataclass(slots=True)
class RowsOverFsdp(RowsOverFsdpBase):
    """Placement of a weight that FSDP shards by rows, without delayed scaling.

    Attributes:
        amax: Amaxes of the whole weight's blocks for the output, if ranks have exchanged the amaxes of all layers in
            one message. If None, the op exchanges those that it needs.
        amax_for_grad_input: The same for grad_input. If None, the backward exchanges those that it needs.
        rows: The rows that each rank has.
    """

    amax: Tensor | None
    amax_for_grad_input: Tensor | None
    rows: Rows

    def check(self, x: Tensor, recipe: Recipe) -> None:
        """Raise a ValueError for delayed scaling, whose state only the op fsdp_delayed_linear takes."""
        if recipe.history():
            raise ValueError(
                "fsdp_linear: the recipe has delayed scaling, whose state this op has no place for. Take "
                "fsdp_delayed_linear."
            )


@dataclass(slots=True)
class RowsOverFsdpForGradInput(_OverFsdp):
    """Placement of the op for grad_input of a weight that FSDP shards by rows.

    Attributes:
        amax: Amaxes of the whole weight's blocks for grad_input. If None, the op exchanges those that it needs.
        multiplier: The forward's multipliers of input, weight and grad_output, (3,) float32; None without delayed
            scaling.
        rows: The rows that each rank has.
    """

    amax: Tensor | None
    multiplier: Tensor | None
    rows: Rows

    def given(self) -> dict[str, Any]:
        """Return keyword arguments of `Operands`: each rank's rows, the amaxes, the forward's multipliers."""
        return {"rows": self.rows, "weight_amax": self.amax, "multiplier": self.multiplier}


@dataclass(slots=True)
class RowsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """Placement of the op for grad_weight of a weight that FSDP shards by rows.

    Attributes:
        multiplier: The forward's multipliers of input, weight and grad_output, (3,) float32; None without delayed
            scaling.
        dtype: Dtype of the shard, and of its gradient.
        rows: The rows that each rank has.
    """

    multiplier: Tensor | None
    dtype: torch.dtype
    rows: Rows

    def given(self) -> dict[str, Any]:
        """Return a keyword argument of `Operands`: the forward's multipliers, None without delayed scaling."""
        return {"multiplier": self.multiplier}


@dataclass(slots=True)
class GroupsOverFsdp(_OverFsdp):
    """Placement of stacked weights that FSDP shards by whole matrices; ``rows`` has each rank's number of matrices."""

    rows: Rows

    def first_matrix(self) -> int:
        """Return the index of the first matrix that this rank has."""
        return sum(self.rows.sizes[: self.rows.rank])

    def for_grad_weight(self, dtype: torch.dtype, used: Tensor | None) -> Placement:
        """Return the placement of the op for grad_weight, with ``dtype``, the dtype of the shard."""
        return GroupsOverFsdpForGradWeight(dtype, self.rows)


@dataclass(slots=True)
class GroupsOverFsdpForGradWeight(_OverFsdpForGradWeight):
    """Placement of the op for grad_weight of stacked weights that FSDP shards by whole matrices.

    ``dtype`` is the dtype of the shard; ``rows`` has the number of matrices on each rank.
    """

    dtype: torch.dtype
    rows: Rows
