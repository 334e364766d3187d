"""fp8compile.grouped_linear, and grouped_mm with the arguments of ``torch.nn.functional.grouped_mm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fp8compile._compat import is_dtensor
from fp8compile.nn.functional import PLAIN, check_recipe, check_tensor, in_dtype_of_autocast, only_given
from fp8compile.nn.ungathered_experts import UngatheredStack
from fp8compile.ops import fsdp_grouped_linear, known_codes_grouped_linear
from fp8compile.ops import grouped_linear as grouped_linear_op
from fp8compile.ops.groups.checked_offsets import checked_offsets
from fp8compile.ops.layer.layer_ops import FSDP_GROUPED, GROUPED
from fp8compile.ops.layer.make_weight_codes import Sets, flat_sets
from fp8compile.ops.layer.statistics.observe import Observer
from fp8compile.quantizers import Recipe

__all__ = ["checked_groups", "grouped_linear", "grouped_mm"]


def _check_local(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"grouped_linear: {name} is a {type(tensor).__name__}; it is a tensor.")
    if type(tensor) not in PLAIN and is_dtensor(tensor):
        raise TypeError(
            f"grouped_linear: {name} is a DTensor; groups are those of one rank. Pass its local tensor, .to_local()."
        )


def _check_shapes(x: Tensor, weight: Tensor | UngatheredStack, offsets: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 3:
        raise ValueError(
            f"grouped_linear: weight has shape {tuple(weight.shape)}; it is (groups, out_features, in_features)."
        )
    groups, out_features, in_features = weight.shape
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(
            f"grouped_linear: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; x is (rows, {in_features}), "
            "rows sorted by group."
        )
    if offsets.dtype != torch.int32 or offsets.shape != (groups,):
        raise ValueError(
            f"grouped_linear: offsets is {offsets.dtype} of shape {tuple(offsets.shape)}; it is torch.int32 of shape "
            f"({groups},), where each group ends: torch.cumsum(sizes, 0, dtype=torch.int32)."
        )
    if not (groups and out_features and in_features):
        raise ValueError(
            f"grouped_linear: weight has shape {tuple(weight.shape)}; it has at least one group, and each matrix at "
            "least one row and one column."
        )
    if bias is not None and bias.shape != (groups, out_features):
        raise ValueError(
            f"grouped_linear: bias has shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; bias is (groups, "
            f"out_features), ({groups}, {out_features})."
        )


def _check_ungathered(x: Tensor, weight: Any) -> None:  # an UngatheredStack
    if weight.spread is not None:
        raise TypeError(
            "grouped_linear: the experts of weight are spread over ranks; groups are those of one rank. Send rows to "
            "the ranks of their experts by fp8compile.parallel.expert_routes, or apply ExpertParallel to the module."
        )
    if x.dtype != weight.dtype:
        raise TypeError(
            f"grouped_linear: x is {x.dtype} and the weight is used in {weight.dtype}; they have one dtype. Cast x, "
            "pass mp_policy=MixedPrecisionPolicy(param_dtype=...) to graph_fsdp, or run under torch.autocast."
        )


def checked_groups(
    x: Tensor, weight: Tensor | UngatheredStack, offsets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """Check a grouped linear layer's operands; return them cast to autocast's dtype if autocast is on.

    For the arguments see `grouped_linear`.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "grouped_linear: torch.jit.trace has no type for a recipe. Use torch.compile or torch.export."
        )
    operands: dict[str, Any] = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    is_ungathered = isinstance(weight, UngatheredStack)
    tensors = [name for name in operands if name != "weight" or not is_ungathered]
    for name in tensors:
        _check_local(name, operands[name])
    _check_local("offsets", offsets)
    if offsets.device != x.device:
        raise ValueError(
            f"grouped_linear: offsets is on {offsets.device} and x on {x.device}; move them to one device."
        )
    operands = in_dtype_of_autocast("grouped_linear", operands)
    x, weight, bias = operands["x"], operands["weight"], operands.get("bias")
    for name in tensors:
        check_tensor("grouped_linear", name, operands[name], x)
    if is_ungathered:
        _check_ungathered(x, weight)
    _check_shapes(x, weight, offsets, bias)
    return x, weight, bias


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    check_in_graph: bool = False,
    weight_codes: Sets | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Apply a linear layer to each group of rows, such as one expert's tokens, with FP8 GEMMs.

    For each group it computes ``y[start:end] = x[start:end] @ weight[group].T + bias[group]``, with ``start`` 0 or
    ``offsets[group - 1]`` and ``end`` ``offsets[group]``. Each group has the codes and scales that
    ``fp8compile.linear`` would have for its rows and matrix. The sizes of groups are data: the host never waits for
    them, and no graph is compiled again when they change.

    It is differentiable once in x, weight and bias, which ``torch.autocast`` casts to its dtype first.

    Args:
        x: (rows, in_features), bfloat16, float16 or float32, rows sorted by group.
        weight: (groups, out_features, in_features), the dtype of ``x``.
        offsets: (groups,), int32, the end of each group. A group may be empty. Rows after the last group belong to no
            group, and no amax or GEMM reads them.
        bias: (groups, out_features), the dtype of ``x``, or None. The bias is added in this dtype.
        recipe: Quantizers for the operands: ``rowwise_bf16_wgrad``, ``rowwise``, ``tensorwise``, ``blockwise``,
            ``mxfp8``, ``nvfp4``, or another recipe whose blocks lie within a row or along the tokens of one group.
        check_in_graph: Whether compiled code checks ``offsets`` too. Eager mode always does.
        weight_codes: The codes of ``weight``, if its module keeps codes; see `fp8compile.linear`.
        observer: Buffers to which the backward adds statistics of the operands; see `fp8compile.linear`.

    Returns:
        (rows, out_features), the dtype of ``x`` (or of autocast). Rows after the last group are zeros, and so is their
        gradient with respect to ``x``.

    Raises:
        TypeError: ``recipe`` is not a recipe, a dtype or layout is not supported, or dtypes differ.
        ValueError: Shapes or devices do not fit. Offsets decrease or exceed the rows (on a GPU an assertion on the
            device). The recipe has delayed scaling, stochastic rounding with one level of scales, or blocks that
            hold tokens of two groups.
        RuntimeError: This device has no grouped GEMM for the recipe, or ``torch.jit.trace`` is running.
    """
    given = x, weight, offsets, bias
    if has_torch_function(given):
        how: Any = only_given(weight_codes=weight_codes, observer=observer)
        how |= {"recipe": recipe, "check_in_graph": check_in_graph}
        return handle_torch_function(grouped_linear, given, *given, **how)
    check_recipe("grouped_linear", recipe)
    x, weight, bias = checked_groups(x, weight, offsets, bias)
    if check_in_graph or not torch.compiler.is_compiling():
        # the check is an op, so that it also takes tensors without data and tensors of vmap
        offsets = checked_offsets(offsets, x.shape[0])
    if isinstance(weight, UngatheredStack):
        rows = weight.rows
        y = fsdp_grouped_linear(x, weight.shard, offsets, bias, rows, recipe)
        given = weight.shard, offsets, rows
        return y if observer is None else FSDP_GROUPED.observe(y, x, *given, observer=observer, recipe=recipe)
    if weight_codes is None:
        y = grouped_linear_op(x, weight, offsets, bias, recipe)
    else:
        y = known_codes_grouped_linear(x, weight, offsets, bias, *flat_sets(weight_codes), recipe)
    return y if observer is None else GROUPED.observe(y, x, weight, offsets, observer=observer, recipe=recipe)


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: Recipe,
    observer: Observer | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm`` in FP8: `grouped_linear` with the arguments of that function.

    Args:
        mat_a: (rows, in_features), rows sorted by group.
        mat_b: (groups, in_features, out_features).
        offs: (groups,), int32, the end of each group.
        bias: (groups, out_features), or None.
        out_dtype: The dtype of ``mat_a``, or None.
        recipe: Quantizers for the operands, as `grouped_linear` takes them.
        observer: The same as for `grouped_linear`.

    Returns:
        (rows, out_features). Rows after the last group are zeros.

    Raises:
        TypeError, ValueError, RuntimeError: In the cases of `grouped_linear`. A ValueError also for another
            ``out_dtype``.
    """
    for name, given in {"mat_a": mat_a, "mat_b": mat_b, "offs": offs}.items():
        if not isinstance(given, (Tensor, UngatheredStack)):
            raise TypeError(f"grouped_mm: {name} is a {type(given).__name__}; it is a tensor.")
    if out_dtype is not None and out_dtype != mat_a.dtype:
        raise ValueError(
            f"grouped_mm: out_dtype is {out_dtype} and mat_a {mat_a.dtype}; the result has its dtype. Cast it."
        )
    if mat_b.ndim != 3:
        raise ValueError(
            f"grouped_mm: mat_b has shape {tuple(mat_b.shape)}; it is (groups, in_features, out_features). Products "
            "over tokens are made by the backward."
        )
    return grouped_linear(mat_a, mat_b.transpose(-2, -1), offs, bias, recipe=recipe, observer=observer)
