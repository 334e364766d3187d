"""The GEMMs of the linear layer on operands that are sharded over ranks.

For C = A @ B, a group of ranks shards A (m, k) along m, along k or not at all, and B (k, n) along k, along n or not at
all. "-" is no sharding:

    A     B     this rank computes               A     B     what is gathered first, as codes
    -     -     all of C                         m     n     A
    m     -     its rows                         m     k     A (in grad_weight: B)
    -     n     its columns                      k     n     A
    k     k     a partial sum of C               k     k'    B, if A and B are sharded at different places
    k     -     a partial sum: B is narrowed to A's k
    -     k     a partial sum: A is narrowed to B's k

A layer with `OverGroup` and without ``sequence_dim`` sends nothing but sums, which `LayerSharding.finish` reduces:

    weight_dim   output         grad_input     grad_weight
    0 (N)        its columns    a sum          its rows
    1 (K)        a sum          its columns    its columns

A weight is never gathered here: ranks send activations and gradients. GEMMs in high precision gather values instead of
codes. With groups of tokens, the weight is a stack, and each group of rows is multiplied by its own matrix.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.layout.cuts import SIDES, DimSharding, Sharding
from fp8compile.layout.quantized import Plain, Quantized, as_operand
from fp8compile.ops.collectives import sent_in_backward
from fp8compile.ops.gemms.grouped.grouped_mm import grouped_mm
from fp8compile.ops.layer.gather_operands import Part, gather, narrow
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.quantizers import GEMMS, Gemm
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["Product", "GroupPlan", "as_read", "multiply_parts", "plans_of"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


@dataclass(frozen=True)
class GroupPlan:
    """What the ranks of one group do for a GEMM (m, k) by (k, n) of sharded operands a and b.

    Attributes:
        gather: The operand that is gathered before the GEMM: ``"a"``, ``"b"`` or None.
        narrow: The operand that is narrowed to match the other operand's shard: ``"a"``, ``"b"`` or None.
        out: What each rank has of the result: rows (``"m"``), columns (``"n"``), a partial sum (``"sum"``) or all
            (None).
    """

    gather: str | None = None
    narrow: str | None = None
    out: str | None = None


def _gemm_dim(cut: DimSharding | None, ndim: int, columns: str, rows: str, *, transposed: bool) -> str | None:
    """Return the GEMM dim that an operand's sharding ``cut`` divides, ``rows`` or ``columns``; None if not sharded."""
    return None if cut is None else columns if (cut.dim == ndim - 1) != transposed else rows


def _plan(gemm: Gemm, a: str | None, b: str | None, *, same: bool) -> GroupPlan:
    if a is None or b is None:
        if a == "k":
            return GroupPlan(narrow="b", out="sum")
        if b == "k":
            return GroupPlan(narrow="a", out="sum")
        return GroupPlan(out=a or b)
    if a == b == "k":
        return GroupPlan(out="sum") if same else GroupPlan(gather="b", narrow="b", out="sum")
    if a == "m" and b == "k" and gemm is GRAD_WEIGHT:
        return GroupPlan(gather="b", out="m")
    after = _plan(gemm, None, b, same=same)
    return replace(after, gather="a")


def _plan_of(gemm: Gemm, index: int, a: Plain | Quantized, b: Plain | Quantized) -> GroupPlan:
    """Return the `GroupPlan` of the group of ranks ``index``; earlier groups' plans made ``a`` and ``b``."""
    (ndim_a, cut_a), (ndim_b, cut_b) = ((each.ndim, each.cuts[index]) for each in (a, b))
    dim_a = _gemm_dim(cut_a, ndim_a, "k", "m", transposed=gemm.a_transposed)
    dim_b = _gemm_dim(cut_b, ndim_b, "n", "k", transposed=gemm.b_transposed)
    # grad_weight sums over tokens: both operands must have the same ones, so the cut dims must be equal too
    same = (
        cut_a is not None
        and cut_b is not None
        and cut_a.matches(cut_b)
        and (gemm is not GRAD_WEIGHT or cut_a.dim == cut_b.dim)
    )
    return _plan(gemm, dim_a, dim_b, same=same)


class Product(NamedTuple):
    """This rank's part of a GEMM's result.

    Attributes:
        local: The part, (m, n), or (E, m, n) for the gradient of stacked weights.
        plans: The `GroupPlan` of each group of ranks.
        cuts: How the left operand was sharded when it was multiplied.
        shape: Shape of this rank's part of the left operand when it was multiplied, with its leading dims.
    """

    local: Tensor
    plans: list[GroupPlan]
    cuts: Sharding
    shape: torch.Size


def _summed_dim(gemm: Gemm, name: str, ndim: int, cut: DimSharding) -> int:
    """Return the dim of operand ``name``, ``"a"`` or ``"b"``, that the GEMM sums; ``cut`` shards the other operand."""
    if gemm is GRAD_WEIGHT:
        return cut.dim  # both operands have the layer's tokens
    if name == "a":
        return ndim - 1
    return ndim - 1 if gemm.b_transposed else ndim - 2


def _prepared(gemm: Gemm, a: Part, b: Part) -> tuple[Part, Part, list[GroupPlan]]:
    """Gather or narrow both operands as this module's table says; returns both, and each group's `GroupPlan`."""
    operands = {"a": a, "b": b}
    plans: list[GroupPlan] = []
    for index in range(len(a.layout.cuts)):
        plan = _plan_of(gemm, index, operands["a"], operands["b"])
        if plan.gather is not None:
            operands[plan.gather] = gather(operands[plan.gather], index)
        if plan.narrow is not None:
            cut: Any = operands["b" if plan.narrow == "a" else "a"].cuts[index]
            dim = _summed_dim(gemm, plan.narrow, operands[plan.narrow].ndim, cut)
            operands[plan.narrow] = narrow(operands[plan.narrow], index, replace(cut, dim=dim))
        plans.append(plan)
    return operands["a"], operands["b"], plans


def plans_of(gemm: Gemm, a: Plain, b: Plain) -> list[GroupPlan]:
    """Return the `GroupPlan` of each group of ranks for a GEMM of two operands, from shapes and layouts only."""
    without_data = [replace(part, local=torch.empty_like(part.local, device="meta")) for part in (a, b)]
    return _prepared(gemm, *without_data)[2]


def _multiply_codes(
    gemm: Gemm, a: Quantized, b: Quantized, plans: list[GroupPlan], out_dtype: torch.dtype, operands: Operands
) -> Tensor:
    (left, *left_windows), (right, *right_windows) = as_operand(a), as_operand(b)
    if operands.phase is not Phase.EAGER:
        gathered = [plan.gather for plan in plans]  # these are in memory already, so `laid_out` need not store them
        left = left if "a" in gathered else operands.laid_out(left, gemm.a)
        right = right if "b" in gathered else operands.laid_out(right, gemm.b)
    product = operands.multiply(left, right, out_dtype, gemm)
    # cut the windows' zeros off both sides of the result; along the summed dim zeros change nothing
    windows = left_windows[gemm.a_transposed], right_windows[not gemm.b_transposed]
    for dim, window in zip(SIDES, windows, strict=True):
        product = product if window is None else window.extract(product, dim)
    return product


def _product_as_is(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None = None) -> Product:
    """Gather or narrow two operands as the GEMM needs, then multiply them in their own dtype, without quantizing."""
    weight = b.cuts
    a, b, plans = _prepared(gemm, a, b)
    if (offs := a.layout.offs) is not None:
        right = b.local.transpose(-2, -1) if gemm is GRAD_INPUT else b.local
        local = grouped_mm(a.local, right, offs, operands.recipe.gemm_config(gemm))
        return Product(local, plans, a.cuts, a.local.shape)
    left, right = gemm.oriented(as_matrix(a.local), as_matrix(b.local))
    added = None if bias is None else _bias_of_columns(bias, plans, a.cuts, weight)
    local = left @ right if added is None else torch.addmm(added, left, right)
    return Product(local, plans, a.cuts, a.local.shape)


def multiply_parts(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None = None) -> Product:
    """Compute one GEMM of a layer, in the dtype of ``a``, from this rank's shards of the operands.

    ``operands`` quantizes ``a`` and ``b``, which are not transposed yet. If the recipe has no quantizers for the GEMM,
    both are multiplied in their own dtype. ``bias``, for an output without groups, is whole or sharded like the
    weight's rows; a product of codes is rounded before the bias is added.
    """
    if a.local.is_meta:
        return _product_as_is(gemm, a, b, operands, bias)  # meta tensors have no data: this gives shape and plans
    # A backward's collectives stay in the backward. If the partitioner hoisted them into the forward, a gather that
    # two layers share would be sent in both passes, and ranks of different sizes would hoist different collectives and
    # wait for each other.
    in_backward = gemm is not OUTPUT and any((*a.cuts, *b.cuts))
    if not in_backward and not operands.weight_in_turns:
        return _multiply_parts(gemm, a, b, operands, bias)
    with (
        sent_in_backward() if in_backward else nullcontext(),
        inductor.left_in_backward() if operands.weight_in_turns and gemm is GRAD_INPUT else nullcontext(),
    ):
        product = _multiply_parts(gemm, a, b, operands, bias)
    if operands.weight_in_turns and gemm is OUTPUT:
        inductor.never_recompute(product.local)
    return product


def _multiply_parts(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None) -> Product:
    out_dtype = a.local.dtype
    if operands.recipe.quantizers(gemm) is None:
        left, right = (operands.in_high_precision(*each, out_dtype) for each in ((a, gemm.a), (b, gemm.b)))
        return _product_as_is(gemm, left, right, operands, bias)
    a_codes, b_codes, plans = _prepared(gemm, operands.of(a, gemm.a), operands.of(b, gemm.b))
    product = _multiply_codes(gemm, a_codes, b_codes, plans, out_dtype, operands)
    if bias is not None and (added := _bias_of_columns(bias, plans, a_codes.cuts, b.cuts)) is not None:
        product = product + as_read(added, operands.phase)
    return Product(product, plans, a_codes.cuts, a_codes.codes.shape)


def as_read(tensor: Tensor, phase: Phase) -> Tensor:
    """Round a traced tensor to its dtype, so that fused code reads the value that eager mode would have stored."""
    return tensor if phase is Phase.EAGER else rounded(tensor).to(tensor.dtype)


def _bias_of_columns(bias: Plain, plans: list[GroupPlan], a: Sharding, weight: Sharding) -> Tensor | None:
    """Return the bias for this rank's columns of the output; None if another rank adds it to its partial sum."""
    for index, plan in enumerate(plans):
        if plan.out == "n" and bias.cuts[index] is None:
            cut: Any = weight[index]
            bias = narrow(bias, index, replace(cut, dim=0))
        elif plan.out != "n" and bias.cuts[index] is not None:
            bias = gather(bias, index)
    summands: list[Any] = [cut for cut, plan in zip(a, plans, strict=True) if plan.out == "sum"]
    return None if any(cut.rank for cut in summands) else bias.local
