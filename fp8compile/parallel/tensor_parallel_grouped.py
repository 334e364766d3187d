"""Grouped linear layers whose matrices are sharded over ranks: tensor parallelism within experts.

                                     weights       input of each rank   output of each rank
    column_parallel_grouped_linear   (E, N/R, K)   (rows, K)            (rows, N/R)
    row_parallel_grouped_linear      (E, N, K/R)   (rows, K/R)          (rows, N)

E is the number of experts, N out_features, K in_features and R the number of ranks. Between the two layers, ranks send
only the amaxes of blocks that span several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile.nn.layer.functional import check_recipe
from fp8compile.nn.layer.grouped_linear import checked_groups
from fp8compile.nn.layer.ungathered_experts import UngatheredStack
from fp8compile.ops import linear as linear_op
from fp8compile.ops.groups.checked_offsets import checked_offsets
from fp8compile.ops.layer.layer_sharding import OverGroup
from fp8compile.ops.layer.observer import Observer
from fp8compile.parallel.tensor_parallel_linear import check_group
from fp8compile.quantizers import Recipe
from fp8compile.tensor import check_agreement, own_sizes

__all__ = ["column_parallel_grouped_linear", "row_parallel_grouped_linear"]


def _parallel(
    function: str,
    weight_dim: int,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    group: ProcessGroup,
    feature_sizes: Sequence[int] | None,
    observer: Observer | None,
) -> Tensor:
    name = check_group(function, group, x, weight, offsets, bias)
    check_recipe(function, recipe)
    if isinstance(weight, UngatheredStack):
        raise TypeError(
            f"{function}: graph_fsdp already shards the experts of `weight`. Use either graph_fsdp or this function, "
            "not both."
        )
    x, weight, bias = checked_groups(x, weight, offsets, bias)
    if not torch.compiler.is_compiling():
        offsets = checked_offsets(offsets, x.shape[0])
    what = f"dim {weight_dim} of weight"
    features = own_sizes(function, "feature_sizes", feature_sizes, group, weight.shape[weight_dim], what)
    check_agreement(function, x, group, feature_sizes=features)
    sharding = OverGroup(weight_dim=weight_dim - 1, ranks=group.size(), rank=group.rank(), group=name)
    args: Any = offsets, [], features, sharding, recipe
    y = linear_op(x, weight, bias, *args)
    return y if observer is None else observer.observe(y, x, weight, *args)


def column_parallel_grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    group: ProcessGroup,
    feature_sizes: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """`fp8compile.grouped_linear` with the rows of each matrix sharded over ranks; returns this rank's features.

    Quantization, the output and the weight's gradient are bit-identical to a single process. The gradient of ``x`` is
    a sum over ranks. Differentiable once. All ranks of the group must call this with the same rows of ``x``.

    Args:
        x: (rows, in_features), sorted by group, the same on all ranks.
        weight: (groups, out_features / R, in_features), this rank's rows of each matrix.
        offsets: (groups,), int32, the end of each group, the same on all ranks.
        bias: (groups, out_features / R), this rank's shard, or None.
        recipe: Quantizers, as for `fp8compile.grouped_linear`.
        group: The R ranks.
        feature_sizes: Number of rows of each matrix on each rank; by default the same on all ranks. If a block has
            more than one row but not all rows, each shard must end at a block boundary.
        observer: Buffers in which the backward accumulates statistics, from `fp8compile.nn.Observed.observer`; or
            None.

    Returns:
        (rows, out_features / R), the dtype of ``x`` (or of autocast), zeros after the last group.

    Raises:
        TypeError, RuntimeError: As for `fp8compile.grouped_linear`; or ``group`` is not a process group.
        ValueError: A shape is wrong, as for `fp8compile.grouped_linear`; or a shard ends within a block, ranks pass
            different sizes, or the recipe has global scales (with two or more ranks).
    """
    return _parallel(
        "column_parallel_grouped_linear", 1, x, weight, offsets, bias, recipe, group, feature_sizes, observer
    )


def row_parallel_grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    group: ProcessGroup,
    feature_sizes: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """`fp8compile.grouped_linear` with the columns of each matrix sharded over ranks; returns the sum over ranks.

    Quantization and both gradients are bit-identical to a single process. The output is a sum over ranks, in the dtype
    of ``x``. Differentiable once. All ranks of the group must call this with the same rows of ``x``.

    Args:
        x: (rows, in_features / R), sorted by group, this rank's features.
        weight: (groups, out_features, in_features / R), this rank's columns of each matrix.
        offsets: (groups,), int32, the end of each group, the same on all ranks.
        bias: (groups, out_features), the same on all ranks, or None. Added once.
        recipe: Quantizers, as for `fp8compile.grouped_linear`.
        group: The R ranks.
        feature_sizes: Number of columns of each matrix on each rank; by default the same on all ranks. If a block has
            more than one column but not all columns, each shard must end at a block boundary.
        observer: Buffers in which the backward accumulates statistics, from `fp8compile.nn.Observed.observer`; or
            None.

    Returns:
        (rows, out_features), the dtype of ``x`` (or of autocast), zeros after the last group.

    Raises:
        TypeError, ValueError, RuntimeError: As for `column_parallel_grouped_linear`.
    """
    return _parallel(
        "row_parallel_grouped_linear", 2, x, weight, offsets, bias, recipe, group, feature_sizes, observer
    )
