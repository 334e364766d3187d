"""Tensor parallel linear layers on the plain tensors of one rank, like Megatron's layers.

                             weight     input of each rank                     output of each rank
    column_parallel_linear   (N/R, K)   all tokens or its tokens; K features   all tokens; N/R features
    row_parallel_linear      (N, K/R)   all tokens; K/R features               all tokens or its tokens; N features

N is out_features, K in_features and R the number of ranks. The first layer followed by the second computes an MLP or
an attention block, and nothing is sent between the two. Sums are sent in the dtype of the tensor. What is sent:

    tokens    pass       column_parallel_linear                            row_parallel_linear
    all       forward    nothing                                           output, all-reduced
    all       backward   grad_input, all-reduced                           nothing
    sharded   forward    codes of x, gathered                              output, reduce-scattered
    sharded   backward   grad_input, reduce-scattered; codes of x again    codes of grad_output, gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8compile.nn.layer.functional import check_recipe, checked_operands
from fp8compile.ops import linear as linear_op
from fp8compile.ops.layer.layer_sharding import OverGroup
from fp8compile.ops.layer.observer import Observer
from fp8compile.quantizers import Recipe
from fp8compile.tensor import check_agreement, checked_sizes, own_sizes, shown
from fp8compile.tensor.check_arguments import group_name

__all__ = ["check_group", "column_parallel_linear", "row_parallel_linear"]


def check_group(function: str, group: object, *tensors: object) -> str:
    """Return a process group's name; raise a TypeError if ``group`` is no group or a tensor is a DTensor.

    ``function`` names the caller in the error.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise TypeError(
            f"{function}: a tensor is a DTensor, but {function} requires plain tensors, the local shards of a rank. "
            "Pass .to_local(), or pass the DTensors to fp8compile.linear."
        )
    name = group_name(function, group)
    if name is None:
        raise TypeError(f"{function}: `group` is None; it must be a process group. On one rank use fp8compile.linear.")
    return name


def _shared_sizes(
    function: str, argument: str, given: object, group: ProcessGroup, total: int, what: str
) -> tuple[int, ...]:
    """Return the sizes of all ranks' shards of a dim of size ``total``: the given sizes, or equal sizes.

    ``function``, ``argument`` and ``what`` (the thing that is sharded) are names for errors.
    """
    if given is None:
        if total % group.size():
            raise ValueError(
                f"{function}: {what} are {total}, which is not a multiple of the {group.size()} ranks. Pass the "
                f"number for each rank: {argument}=(...)."
            )
        return (total // group.size(),) * group.size()
    sizes = checked_sizes(function, argument, given, group)
    if sum(sizes) != total:
        raise ValueError(
            f"{function}: `{argument}` is {sizes}, which sums to {sum(sizes)}, but {what} are {total}. Pass sizes "
            f"that sum to {total}."
        )
    return sizes


def _sequence_dim(function: str, x: Tensor, sequence_dim: object, sequence_sizes: object) -> int | None:
    """Check ``sequence_dim``, and return the same dim of ``x`` as a nonnegative number; None for None.

    Raise a ValueError for ``sequence_sizes`` without ``sequence_dim``. ``function`` names the caller in errors.
    """
    if sequence_dim is None:
        if sequence_sizes is not None:
            raise ValueError(
                f"{function}: `sequence_sizes` is {shown(sequence_sizes)}, but sequence_dim is None. Pass the dim "
                "that they refer to, or omit both."
            )
        return None
    if type(sequence_dim) is not int:
        raise TypeError(f"{function}: `sequence_dim` is {shown(sequence_dim)}; it must be an int, or None.")
    if not -x.ndim <= sequence_dim < x.ndim or sequence_dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{function}: `sequence_dim` is {sequence_dim}, and x has shape {tuple(x.shape)}; it must be one of the "
            "dims before the last, which is the feature dim."
        )
    return sequence_dim % x.ndim


def _parallel(
    function: str,
    weight_dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    group: ProcessGroup,
    sequence_dim: int | None,
    sequence_sizes: Sequence[int] | None,
    feature_sizes: Sequence[int] | None,
    observer: Observer | None,
) -> Tensor:
    name = check_group(function, group, x, weight, bias)
    check_recipe(function, recipe)
    x, weight, bias = checked_operands(function, x, weight, bias)
    what = f"the {('rows', 'columns')[weight_dim]} of weight"
    features = own_sizes(function, "feature_sizes", feature_sizes, group, weight.shape[weight_dim], what)
    tokens: tuple[int, ...] = ()
    dim = _sequence_dim(function, x, sequence_dim, sequence_sizes)
    if dim is not None:
        known = own_sizes if weight_dim == 0 else _shared_sizes  # each rank has its tokens, or gets them of a sum
        what = f"the entries of x along dim {dim}"
        tokens = known(function, "sequence_sizes", sequence_sizes, group, x.shape[dim], what)
    check_agreement(function, x, group, feature_sizes=features, sequence_sizes=tokens)
    sharding = OverGroup(weight_dim=weight_dim, ranks=group.size(), rank=group.rank(), group=name, sequence_dim=dim)
    args: Any = None, [], [*features, *tokens], sharding, recipe
    y = linear_op(x, weight, bias, *args)
    return y if observer is None else observer.observe(y, x, weight, *args)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    group: ProcessGroup,
    sequence_dim: int | None = None,
    sequence_sizes: Sequence[int] | None = None,
    feature_sizes: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Compute a linear layer with the rows of the weight sharded over ranks; returns this rank's output features.

    Quantization, output and grad_weight are bit-identical to a single process, even if a shard ends within a block;
    grad_input is a sum over ranks. Differentiable once. All ranks of the group must call this.

    Args:
        x: Shape (..., in_features), bfloat16, float16 or float32: all tokens, or this rank's shard.
        weight: Shape (out_features / R, in_features), this rank's rows, the dtype of ``x``.
        bias: Shape (out_features / R,), this rank's shard, or None.
        recipe: Quantizers for the operands.
        group: The R ranks.
        sequence_dim: The dim of ``x`` that is sharded over the ranks; None if each rank has all tokens.
        sequence_sizes: Number of tokens of each rank along ``sequence_dim``, zeros allowed; by default the same on all
            ranks.
        feature_sizes: Number of rows of the weight on each rank; by default the same on all ranks.
        observer: Buffers in which the backward accumulates statistics, from `fp8compile.nn.Observed.observer`; or
            None.

    Returns:
        Shape (..., out_features / R) for all tokens, the dtype of ``x`` (or of autocast).

    Raises:
        TypeError: ``recipe`` is not a Recipe, ``group`` is not a process group, a dtype or layout is not supported, or
            a tensor is a DTensor.
        ValueError: Shapes, sizes or devices do not match, the recipe has delayed scaling, or ranks pass different
            sizes, which the first call with a group compares.
        RuntimeError: This device has no GEMM for the recipe.
    """
    given = sequence_dim, sequence_sizes, feature_sizes, observer
    return _parallel("column_parallel_linear", 0, x, weight, bias, recipe, group, *given)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    group: ProcessGroup,
    sequence_dim: int | None = None,
    sequence_sizes: Sequence[int] | None = None,
    feature_sizes: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Compute a linear layer with the columns of the weight sharded over ranks; returns the sum over ranks.

    Quantization, grad_input and grad_weight are bit-identical to a single process, even if a shard ends within a
    block. The output, for all tokens or for this rank's, is a sum over ranks in the dtype of ``x``. Differentiable
    once. All ranks of the group must call this.

    Args:
        x: Shape (..., in_features / R), this rank's features for all tokens; bfloat16, float16 or float32.
        weight: Shape (out_features, in_features / R), this rank's columns, the dtype of ``x``.
        bias: Shape (out_features,), the same on all ranks, or None. Added once; its gradient covers all tokens.
        recipe: Quantizers for the operands.
        group: The R ranks.
        sequence_dim: The dim of the output that is sharded over the ranks; None if each rank gets all tokens.
        sequence_sizes: Number of tokens that each rank gets along ``sequence_dim``, zeros allowed; equal by default.
        feature_sizes: Number of columns of the weight on each rank; by default the same on all ranks.
        observer: Buffers in which the backward accumulates statistics, from `fp8compile.nn.Observed.observer`; or
            None.

    Returns:
        Shape (..., out_features), the dtype of ``x`` (or of autocast).

    Raises:
        TypeError, ValueError, RuntimeError: As for `column_parallel_linear`.
    """
    given = sequence_dim, sequence_sizes, feature_sizes, observer
    return _parallel("row_parallel_linear", 1, x, weight, bias, recipe, group, *given)
