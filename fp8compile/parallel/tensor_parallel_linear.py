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

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fp8compile.nn.delayed_state import group_name
from fp8compile.nn.functional import check_recipe, checked_operands
from fp8compile.ops import sharded_linear
from fp8compile.ops.layer.layer_ops import SHARDED
from fp8compile.ops.layer.statistics.observe import Observer
from fp8compile.quantizers import Recipe
from fp8compile.tensor import check_agreement, checked_sizes, own_sizes, shown

__all__ = ["check_group", "column_parallel_linear", "row_parallel_linear"]


def check_group(function: str, group: object, *tensors: object) -> str:
    """Return a process group's name; raise a TypeError if ``group`` is no group or a tensor is a DTensor.

    ``function`` names the caller in the error.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise TypeError(
            f"{function}: a tensor is a DTensor, which knows its ranks itself; this function takes what one rank has. "
            "Give DTensors to fp8compile.linear, or pass .to_local()."
        )
    name = group_name(function, group)
    if name is None:
        raise TypeError(f"{function}: group is None; on one rank alone this layer is fp8compile.linear.")
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
                f"{function}: {what} are {total}, no multiple of {group.size()} ranks. Say what each of them gets: "
                f"{argument}=(...)."
            )
        return (total // group.size(),) * group.size()
    sizes = checked_sizes(function, argument, given, group)
    if sum(sizes) != total:
        raise ValueError(f"{function}: {argument} is {sizes}, {sum(sizes)} together, and {what} are {total}.")
    return sizes


def _sequence_dim(function: str, x: Tensor, sequence_dim: object, sequence_sizes: object) -> int | None:
    """Check ``sequence_dim``, and return the same dim of ``x`` as a nonnegative number; None for None.

    Raise a ValueError for ``sequence_sizes`` without ``sequence_dim``. ``function`` names the caller in errors.
    """
    if sequence_dim is None:
        if sequence_sizes is not None:
            raise ValueError(
                f"{function}: sequence_sizes is {shown(sequence_sizes)} and sequence_dim None; name the dim that they "
                "are sizes of, or leave both out."
            )
        return None
    if type(sequence_dim) is not int:
        raise TypeError(f"{function}: sequence_dim is {shown(sequence_dim)}; it is an int, or None.")
    if not -x.ndim <= sequence_dim < x.ndim or sequence_dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{function}: sequence_dim is {sequence_dim}, x has shape {tuple(x.shape)}; it is one of the dims before "
            "the last, which holds features."
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
    dim, tokens = _sequence_dim(function, x, sequence_dim, sequence_sizes), (0,) * group.size()
    if dim is not None:
        known = own_sizes if weight_dim == 0 else _shared_sizes  # each rank has its tokens, or gets them of a sum
        what = f"the entries of x along dim {dim}"
        tokens = known(function, "sequence_sizes", sequence_sizes, group, x.shape[dim], what)
    check_agreement(function, x, group, feature_sizes=features, sequence_sizes=tokens)
    place = weight_dim, features, dim, tokens, group.rank(), name
    y = sharded_linear(x, weight, bias, *place, recipe)
    return y if observer is None else SHARDED.observe(y, x, weight, *place, observer=observer, recipe=recipe)


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
    """A linear layer whose weight's rows are sharded over ranks; returns this rank's output features.

    Codes, scales, output and grad_weight have the same bits as in one process, even if a shard ends within a block;
    grad_input is a sum over ranks. Differentiable once. All ranks of the group call this.

    Args:
        x: Shape (..., in_features), bfloat16, float16 or float32: all tokens, or this rank's.
        weight: Shape (out_features / R, in_features), this rank's rows, the dtype of ``x``.
        bias: Shape (out_features / R,), this rank's shard, or None.
        recipe: Quantizers for the operands.
        group: The R ranks.
        sequence_dim: The dim of ``x`` that is sharded over the ranks; None if each rank has all tokens.
        sequence_sizes: Number of tokens of each rank along ``sequence_dim``, zeros allowed; by default all ranks have
            as many as this one.
        feature_sizes: Number of rows of the weight for each rank; by default all ranks have as many as this one.
        observer: Buffers to which the backward adds statistics, from `fp8compile.nn.Observed.observer`; or None.

    Returns:
        Shape (..., out_features / R) for all tokens, the dtype of ``x`` (or of autocast).

    Raises:
        TypeError: ``recipe`` is not a Recipe, ``group`` is not a process group, a dtype or layout is not supported, or
            a tensor is a DTensor.
        ValueError: Shapes, sizes or devices do not fit; or the recipe has delayed scaling; or ranks give different
            sizes, which they compare in the first call with a group.
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
    """A linear layer whose weight's columns are sharded over ranks; returns the sum over ranks.

    Codes, scales, grad_input and grad_weight have the same bits as in one process, even if a shard ends within a
    block. The output, for all tokens or for this rank's, is a sum over ranks in the dtype of ``x``. Differentiable
    once. All ranks of the group call this.

    Args:
        x: Shape (..., in_features / R), this rank's features for all tokens; bfloat16, float16 or float32.
        weight: Shape (out_features, in_features / R), this rank's columns, the dtype of ``x``.
        bias: Shape (out_features,), the same on all ranks, or None. Added once; its gradient covers all tokens.
        recipe: Quantizers for the operands.
        group: The R ranks.
        sequence_dim: The dim of the output that is sharded over the ranks; None if each rank gets all tokens.
        sequence_sizes: Number of tokens that each rank gets along ``sequence_dim``, zeros allowed; equal parts by
            default.
        feature_sizes: Number of columns of the weight for each rank; by default all ranks have as many as this one.
        observer: Buffers to which the backward adds statistics, from `fp8compile.nn.Observed.observer`; or None.

    Returns:
        Shape (..., out_features), the dtype of ``x`` (or of autocast).

    Raises:
        TypeError, ValueError, RuntimeError: In the cases of `column_parallel_linear`.
    """
    given = sequence_dim, sequence_sizes, feature_sizes, observer
    return _parallel("row_parallel_linear", 1, x, weight, bias, recipe, group, *given)
