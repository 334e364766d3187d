"""LayerSharding: where a layer's tensors are stored, as a constant of the graph.

    UNSHARDED     every tensor is full on this rank
    OverGroup     the ranks of a group shard the weight, and maybe the tokens
    OverFsdp      FSDP shards the weight along its first dim: rows, or matrices of stacked weights

It answers what each tensor's layout is, what is reduced after a GEMM, and what shapes results have. Sizes of shards
may be symbolic, so that they are no part of the constant: the ops take them as ``sizes``. Methods that take ``offs``,
the ends of groups of rows, or None, serve layers with groups too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import STACK, WHOLE, TensorLayout
from fp8compile.ops.collectives import all_reduce, reduce_scatter
from fp8compile.ops.gemms.grouped.grouped_mm import group_sum
from fp8compile.ops.layer.fsdp_gather_high_precision import reduced
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.operands import OUTPUT, Phase, as_read
from fp8compile.ops.layer.sharded_gemm import Product
from fp8compile.quantizers import Recipe
from fp8compile.quantizers.constant import Constant

__all__ = ["UNSHARDED", "LayerSharding", "Layouts", "OverFsdp", "OverGroup"]


class Layouts(NamedTuple):
    """The layouts of a layer's tensors: whether they are stacked or in groups, and how ranks shard them."""

    input: TensorLayout
    weight: TensorLayout
    bias: TensorLayout
    output: TensorLayout


ALL_WHOLE = Layouts(WHOLE, WHOLE, WHOLE, WHOLE)


def _sum_of_tokens(grad_output: Tensor) -> Tensor:
    # the leading dims are not flattened, so that a DTensor need not be redistributed
    tokens = grad_output if grad_output.ndim > 1 else grad_output.unsqueeze(0)  # -0.0 becomes 0.0, as in nn.Linear
    return tokens.sum(tuple(range(tokens.ndim - 1)))


@dataclass(frozen=True, repr=False)
class LayerSharding(Constant):
    """Base class of shardings; its own instance, `UNSHARDED`, stands for tensors that are full on this rank."""

    def fsdp_shards(self) -> Rows | None:
        """Return how FSDP shards the weight along its first dim; None without FSDP."""
        return None

    def layouts(self, ndim: int, sizes: Sequence[int], offs: Tensor | None) -> Layouts:
        """Return how input, weight, bias and output are sharded; ``ndim`` is the input's number of dims."""
        if offs is None:
            return ALL_WHOLE
        tokens = TensorLayout(offs=offs)
        return Layouts(tokens, STACK, WHOLE, tokens)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in ``dtype``, the dtype of the tokens; by default the weight unchanged."""
        return weight

    def finish(self, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """Turn a rank's product into this rank's output or grad_input: reshape, and sum over ranks if needed.

        ``tokens`` is the layout of the result, ``shape`` the shape of the left operand. If ranks shard the layer,
        `OverGroup` reads ``product.shape`` instead, because the operand may have been gathered.
        """
        if len(shape) == 2:
            return product.local  # a view costs an eager call 3 us
        return product.local.view(*shape[:-1], product.local.shape[-1])

    def reduce_grad_weight(self, grad_weight: Tensor, dtype: torch.dtype, phase: Phase) -> Tensor:
        """Turn a rank's product into this rank's shard of grad_weight; only FSDP's may have another ``dtype``."""
        return grad_weight.contiguous()

    def grad_bias(self, grad_output: Tensor, offs: Tensor | None, recipe: Recipe) -> Tensor:
        """Return the bias's gradient: (N,), or (E, N) for E groups."""
        if offs is not None:
            return group_sum(grad_output, offs, recipe.gemm_config(OUTPUT))
        return _sum_of_tokens(grad_output)

    def out_features(self, weight: Sequence[int], offs: Any) -> int:
        """Return the number of the output's features on this rank; ``weight`` is the shape of its shard."""
        return weight[-2]

    def tokens(self, own: Sequence[int], sizes: Sequence[int], *, all_ranks: bool) -> list[int]:
        """Return the leading sizes of a result from those of the op's first tensor: of all ranks' tokens, or ours."""
        return list(own)

    def empty_grad_weight(self, grad_output: Tensor, features: int, dtype: torch.dtype, offs: Tensor | None) -> Tensor:
        """Make an uninitialized tensor like grad_weight, with ``features`` columns."""
        batch = () if offs is None else (offs.shape[0],)
        return grad_output.new_empty((*batch, grad_output.shape[-1], features))

    def shards_out_features(self) -> bool:
        """Whether ranks shard the output's features, and sum grad_input; else the input's, and sum the output."""
        return True

    def counts(self, layout: TensorLayout) -> bool:
        """Whether this rank counts its elements in statistics; together the ranks count each element once."""
        return True

    def first_matrix(self, offs: Tensor | None) -> int:
        """Return the index of this rank's first matrix among the stacked matrices of all ranks."""
        return 0


UNSHARDED = LayerSharding()


@dataclass(frozen=True, kw_only=True, repr=False)
class OverGroup(LayerSharding):
    """The ranks of a group shard the weight, or every stacked matrix, and maybe the tokens of the input or output.

    The op itself calls collectives, so a graph contains the group's name and serves this group only. If the group has
    one rank, nothing is sharded or sent. ``sizes`` has each rank's number of features, then, with ``sequence_dim``,
    each rank's number of tokens along this dim.

    Attributes:
        weight_dim: The sharded dim of each matrix. If 0 (out_features), the output's features are sharded too. If 1
            (in_features), the input's features are sharded too, and the output is a sum over ranks.
        ranks: Number of ranks.
        rank: This rank's number in the group.
        group: The name of the group.
        sequence_dim: The leading dim along which tokens are sharded: the input's tokens if ``weight_dim`` is 0, the
            output's if it is 1. None if every rank has all tokens.
    """

    weight_dim: int
    ranks: int
    rank: int
    group: str
    sequence_dim: int | None = None

    def layouts(self, ndim: int, sizes: Sequence[int], offs: Tensor | None) -> Layouts:
        """Return how input, weight, bias and output are sharded; as without ranks if there is one."""
        if self.ranks == 1:
            return super().layouts(ndim, sizes, offs)
        batch = 0 if offs is None else 1
        features = DimSharding(self.group, self.rank, ndim - 1, tuple(sizes[: self.ranks]))
        cut_weight = replace(features, dim=self.weight_dim + batch)
        weight = TensorLayout((cut_weight,), batch=batch)
        tokens = None
        if self.sequence_dim is not None:
            tokens = replace(features, dim=self.sequence_dim, sizes=tuple(sizes[self.ranks :]))
        whole, cut = TensorLayout((tokens,), offs=offs), TensorLayout((features,), offs=offs)
        if self.weight_dim == 0:
            return Layouts(whole, weight, TensorLayout((cut_weight,)), cut)
        return Layouts(cut, weight, TensorLayout((None,)), whole)

    def finish(self, product: Product, tokens: TensorLayout, shape: torch.Size) -> Tensor:
        """Reshape a rank's product, and sum it over ranks if they shard the summed dim: all tokens, or this rank's."""
        if not tokens.cuts:
            return super().finish(product, tokens, shape)
        (plan,), (cut,) = product.plans, tokens.cuts
        local = product.local.view(*product.shape[:-1], product.local.shape[1])
        if plan.out == "sum" and cut is None:
            return all_reduce(local, "sum", self.group)
        if plan.out == "sum" and cut is not None:
            local = reduce_scatter(local, "sum", cut.dim, cut.sizes, cut.rank, self.group)
        return local.contiguous()

    def grad_bias(self, grad_output: Tensor, offs: Tensor | None, recipe: Recipe) -> Tensor:
        """Return the bias's gradient, summed over the tokens of all ranks."""
        own = super().grad_bias(grad_output, offs, recipe)
        has_some_tokens = self.weight_dim == 1 and self.sequence_dim is not None and self.ranks > 1
        return all_reduce(own, "sum", self.group) if has_some_tokens else own

    def tokens(self, own: Sequence[int], sizes: Sequence[int], *, all_ranks: bool) -> list[int]:
        """Return the leading sizes of a result; ``sizes`` ends with each rank's number of tokens."""
        shape = list(own)
        if self.sequence_dim is not None:
            each = sizes[self.ranks :]
            shape[self.sequence_dim] = sum(each) if all_ranks else each[self.rank]
        return shape

    def shards_out_features(self) -> bool:
        """Whether ranks shard the output's features."""
        return self.weight_dim == 0

    def counts(self, layout: TensorLayout) -> bool:
        """Whether this rank counts its elements: if ranks shard the tensor, or on the first rank."""
        return any(layout.cuts) or self.rank == 0


# forward and backward quantize the same shard: one node, so that the backward finds the forward's scales
_in_dtype = inductor.once_a_graph(Tensor.to)


@dataclass(frozen=True, repr=False)
class OverFsdp(LayerSharding):
    """FSDP shards the weight along its first dim: by rows, or stacked weights by matrices.

    Each rank casts its shard to the dtype of the tokens, and quantizes it to the FP8 data that the full weight would
    have. The shard is saved for the backward.

    Attributes:
        shards: The rows, or matrices, that each rank has.
    """

    shards: Rows

    def fsdp_shards(self) -> Rows | None:
        """Return the rows, or matrices, that each rank has."""
        return self.shards

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the shard in ``dtype``."""
        return _in_dtype(weight, dtype)

    def reduce_grad_weight(self, grad_weight: Tensor, dtype: torch.dtype, phase: Phase) -> Tensor:
        """Sum grad_weight over the ranks, and return this rank's rows of it, in ``dtype``."""
        if grad_weight.dtype != getattr(torch, self.shards.reduce_dtype):
            grad_weight = as_read(grad_weight, phase)
        return reduced(grad_weight, dtype, self.shards).contiguous()

    def out_features(self, weight: Sequence[int], offs: Any) -> int:
        """Return the number of rows of the full weight, or of each stacked matrix."""
        return sum(self.shards.sizes) if offs is None else weight[-2]

    def empty_grad_weight(self, grad_output: Tensor, features: int, dtype: torch.dtype, offs: Tensor | None) -> Tensor:
        """Make an uninitialized tensor like this rank's rows, or matrices, of grad_weight."""
        own = self.shards.sizes[self.shards.rank]
        shape = (own, features) if offs is None else (own, grad_output.shape[1], features)
        return grad_output.new_empty(shape, dtype=dtype)

    def first_matrix(self, offs: Tensor | None) -> int:
        """Return the index of the first matrix that this rank has."""
        return 0 if offs is None else sum(self.shards.sizes[: self.shards.rank])
