"""Grouped linear layers whose matrices are sharded over ranks: tensor parallelism within experts.

                                     weights       input of each rank   output of each rank
    column_parallel_grouped_linear   (E, N/R, K)   (rows, K)            (rows, N/R)
    row_parallel_grouped_linear      (E, N, K/R)   (rows, K/R)          (rows, N)

E is the number of experts, N out_features, K in_features and R the number of ranks. Between the two layers, ranks send
only the amaxes of blocks that span several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile.nn.functional import check_recipe
from fp8compile.nn.grouped_linear import checked_groups
from fp8compile.nn.ungathered_experts import UngatheredStack
from fp8compile.ops import sharded_grouped_linear
from fp8compile.ops.groups.checked_offsets import checked_offsets
from fp8compile.ops.layer.layer_ops import SHARDED_GROUPED
from fp8compile.ops.layer.statistics.observe import Observer
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
        raise TypeError(f"{function}: graph_fsdp has cut weight by experts; cut experts one way, by it or by ranks.")
    x, weight, bias = checked_groups(x, weight, offsets, bias)
    if not torch.compiler.is_compiling():
        offsets = checked_offsets(offsets, x.shape[0])
    what = f"dim {weight_dim} of weight"
    features = own_sizes(function, "feature_sizes", feature_sizes, group, weight.shape[weight_dim], what)
    check_agreement(function, x, group, feature_sizes=features)
    place = weight_dim, features, group.rank(), name
    y, given = sharded_grouped_linear(x, weight, offsets, bias, *place, recipe), (x, weight, offsets, *place)
    return y if observer is None else SHARDED_GROUPED.observe(y, *given, observer=observer, recipe=recipe)


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
    """`fp8compile.grouped_linear` with each matrix's rows sharded over ranks; returns this rank's features.

    Codes, scales, the output and the weight's gradient have the same bits as in one process. The gradient of ``x`` is
    a sum over ranks. Differentiable once. All ranks of the group call this with the same rows of ``x``.

    Args:
        x: (rows, in_features), sorted by group, the same on all ranks.
        weight: (groups, out_features / R, in_features), this rank's rows of each matrix.
        offsets: (groups,), int32: where each group ends, the same on all ranks.
        bias: (groups, out_features / R), this rank's shard, or None.
        recipe: Quantizers, as `fp8compile.grouped_linear` takes them.
        group: The R ranks.
        feature_sizes: Number of rows of each matrix on each rank; by default all ranks have as many as this rank. If
            blocks have more than one row but not all rows, each shard has to end where a block ends.
        observer: Buffers to which the backward adds statistics, from `fp8compile.nn.Observed.observer`; or None.

    Returns:
        (rows, out_features / R), the dtype of ``x`` (or of autocast), zeros after the last group.

    Raises:
        TypeError, RuntimeError: The same as `fp8compile.grouped_linear`; or ``group`` is not a process group.
        ValueError: The same as `fp8compile.grouped_linear`; or a shard ends within a block, ranks give different
            sizes, or the recipe has outer scales (with two ranks or more).
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
    """`fp8compile.grouped_linear` with each matrix's columns sharded over ranks; returns the ranks' sum.

    Codes, scales and both gradients have the same bits as in one process. The output is a sum over ranks, in the dtype
    of ``x``. Differentiable once. All ranks of the group call this with the same rows of ``x``.

    Args:
        x: (rows, in_features / R), sorted by group, this rank's features.
        weight: (groups, out_features, in_features / R), this rank's columns of each matrix.
        offsets: (groups,), int32: where each group ends, the same on all ranks.
        bias: (groups, out_features), the same on all ranks, or None. Added once.
        recipe: Quantizers, as `fp8compile.grouped_linear` takes them.
        group: The R ranks.
        feature_sizes: Number of columns of each matrix on each rank; by default all ranks have as many as this rank.
            If blocks have more than one column but not all columns, each shard has to end where a block ends.
        observer: Buffers to which the backward adds statistics, from `fp8compile.nn.Observed.observer`; or None.

    Returns:
        (rows, out_features), the dtype of ``x`` (or of autocast), zeros after the last group.

    Raises:
        TypeError, ValueError, RuntimeError: In the cases of `column_parallel_grouped_linear`.
    """
    return _parallel(
        "row_parallel_grouped_linear", 2, x, weight, offsets, bias, recipe, group, feature_sizes, observer
    )
