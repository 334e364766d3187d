"""fp8compile.grouped_linear, and grouped_mm with the arguments of ``torch.nn.functional.grouped_mm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fp8compile._compat import is_dtensor
from fp8compile.nn.layer.functional import PLAIN, check_recipe, check_tensor, in_dtype_of_autocast, only_given
from fp8compile.nn.layer.ungathered_experts import UngatheredStack
from fp8compile.ops import linear as linear_op
from fp8compile.ops.groups.checked_offsets import checked_offsets
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import UNSHARDED, LayerSharding, OverFsdp
from fp8compile.ops.layer.make_weight_codes import Sets
from fp8compile.ops.layer.observer import Observer
from fp8compile.quantizers import Recipe

__all__ = ["checked_groups", "grouped_linear", "grouped_mm"]


def _check_local(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"grouped_linear: `{name}` is a {type(tensor).__name__}; it must be a tensor.")
    if type(tensor) not in PLAIN and is_dtensor(tensor):
        raise TypeError(f"grouped_linear: `{name}` is a DTensor, but groups are local to a rank. Pass .to_local().")


def _check_shapes(x: Tensor, weight: Tensor | UngatheredStack, offsets: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 3:
        raise ValueError(
            f"grouped_linear: `weight` must be (groups, out_features, in_features), got {tuple(weight.shape)}."
        )
    groups, out_features, in_features = weight.shape
    if x.ndim != 2 or x.shape[1] != in_features:
        raise ValueError(
            f"grouped_linear: `x` has shape {tuple(x.shape)} and `weight` has shape {tuple(weight.shape)}; x must "
            f"be (rows, {in_features}), with rows sorted by group."
        )
    if offsets.dtype != torch.int32 or offsets.shape != (groups,):
        raise ValueError(
            f"grouped_linear: `offsets` is {offsets.dtype} of shape {tuple(offsets.shape)}; it must be torch.int32 "
            f"of shape ({groups},), the end of each group: torch.cumsum(sizes, 0, dtype=torch.int32)."
        )
    if not (groups and out_features and in_features):
        raise ValueError(
            f"grouped_linear: `weight` has shape {tuple(weight.shape)}; it must have at least one group, one row "
            "and one column."
        )
    if bias is not None and bias.shape != (groups, out_features):
        raise ValueError(
            f"grouped_linear: `bias` has shape {tuple(bias.shape)} and `weight` has shape {tuple(weight.shape)}; "
            f"bias must be (groups, out_features), ({groups}, {out_features})."
        )


def _check_ungathered(x: Tensor, weight: Any) -> None:  # an UngatheredStack
    if weight.spread is not None:
        raise TypeError(
            "grouped_linear: the experts of `weight` are sharded over ranks, but groups are local to a rank. Send "
            "rows to the ranks of their experts with fp8compile.parallel.expert_routes, or apply ExpertParallel to "
            "the module."
        )
    if x.dtype != weight.dtype:
        raise TypeError(
            f"grouped_linear: `x` is {x.dtype}, but the weight is used in {weight.dtype}. Cast x, pass "
            "mp_policy=MixedPrecisionPolicy(param_dtype=...) to graph_fsdp, or run under torch.autocast."
        )


def checked_groups(
    x: Tensor, weight: Tensor | UngatheredStack, offsets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """Check a grouped linear layer's operands; return them cast to autocast's dtype if autocast is on.

    For the arguments see `grouped_linear`.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            "grouped_linear: torch.jit.trace does not support recipes. Use torch.compile or torch.export."
        )
    operands: dict[str, Any] = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    is_ungathered = isinstance(weight, UngatheredStack)
    tensors = [name for name in operands if name != "weight" or not is_ungathered]
    for name in tensors:
        _check_local(name, operands[name])
    _check_local("offsets", offsets)
    if offsets.device != x.device:
        raise ValueError(
            f"grouped_linear: `offsets` is on {offsets.device}, but x is on {x.device}. Move both to one device."
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
    ``offsets[group - 1]`` and ``end`` ``offsets[group]``. Each group is quantized exactly as ``fp8compile.linear``
    would quantize its rows and matrix. Group sizes are data: they cause neither a host-device synchronization nor a
    recompilation.

    It is differentiable once with respect to x, weight and bias. ``torch.autocast`` first casts them to its dtype.

    Args:
        x: (rows, in_features), bfloat16, float16 or float32, rows sorted by group.
        weight: (groups, out_features, in_features), the dtype of ``x``.
        offsets: (groups,), int32, the end of each group. A group may be empty. Rows after the last group are ignored.
        bias: (groups, out_features), the dtype of ``x``, or None. The bias is added in this dtype.
        recipe: Quantizers for the operands: ``rowwise_bf16_wgrad``, ``rowwise``, ``tensorwise``, ``blockwise``,
            ``mxfp8``, ``nvfp4``, or another recipe whose blocks are within a row or along the tokens of one group.
        check_in_graph: Whether compiled code also checks ``offsets``. Eager mode always does.
        weight_codes: The cached quantized weight, if there is one; see `fp8compile.linear`.
        observer: Buffers in which the backward accumulates statistics of the operands; see `fp8compile.linear`.

    Returns:
        (rows, out_features), the dtype of ``x`` (or of autocast). Rows after the last group are zeros, and so is their
        gradient with respect to ``x``.

    Raises:
        TypeError: ``recipe`` is not a recipe, a dtype or layout is not supported, or dtypes differ.
        ValueError: Shapes or devices do not match. Offsets decrease or exceed the number of rows (on a GPU, this is a
            device-side assertion). The recipe has delayed scaling, stochastic rounding with one level of scales, or
            blocks that contain tokens of two groups.
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
    sharding: LayerSharding = UNSHARDED
    if isinstance(weight, UngatheredStack):
        weight, sharding = weight.shard, OverFsdp(weight.rows)
    known = [] if weight_codes is None else Known.sets(*weight_codes)
    y = linear_op(x, weight, bias, offsets, known, [], sharding, recipe)
    return y if observer is None else observer.observe(y, x, weight, offsets, [], [], sharding, recipe)


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
        recipe: Quantizers for the operands, as for `grouped_linear`.
        observer: Observer of the operands; see `grouped_linear`.

    Returns:
        (rows, out_features). Rows after the last group are zeros.

    Raises:
        TypeError, ValueError, RuntimeError: As for `grouped_linear`. Any other ``out_dtype`` also raises a ValueError.
    """
    for name, given in {"mat_a": mat_a, "mat_b": mat_b, "offs": offs}.items():
        if not isinstance(given, (Tensor, UngatheredStack)):
            raise TypeError(f"grouped_mm: `{name}` is a {type(given).__name__}; it must be a tensor.")
    if out_dtype is not None and out_dtype != mat_a.dtype:
        raise ValueError(
            f"grouped_mm: `out_dtype` is {out_dtype}; it must be the dtype of mat_a, {mat_a.dtype}. Omit out_dtype, "
            "and cast the result."
        )
    if mat_b.ndim != 3:
        raise ValueError(
            f"grouped_mm: `mat_b` has shape {tuple(mat_b.shape)}; it must be (groups, in_features, out_features). "
            "GEMMs that sum over tokens are only part of the backward."
        )
    return grouped_linear(mat_a, mat_b.transpose(-2, -1), offs, bias, recipe=recipe, observer=observer)
