"""Plans for GEMMs of sharded operands: what ranks gather before a GEMM, and whether they sum its result.

For C = A @ B, a group of ranks shards A (m, k) along m, along k or not at all, and B (k, n) along k, along n or not at
all. "-" is no sharding:

    A     B     this rank computes               A     B     what is gathered first, in FP8
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

A weight is never gathered here: ranks send activations and gradients. GEMMs in high precision gather values instead
of FP8 data. With groups of tokens, the weight is a stack, and each group of rows is multiplied by its own matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8compile.layout.cuts import DimSharding, Sharding
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.layer.gather_operands import Part, gather, narrow
from fp8compile.ops.layer.operands import GRAD_WEIGHT
from fp8compile.quantizers import Gemm

__all__ = ["GroupPlan", "Product", "plans_of", "redistribute"]


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
    return replace(_plan(gemm, None, b, same=same), gather="a")


def _plan_of(gemm: Gemm, index: int, a: Plain | Quantized, b: Plain | Quantized) -> GroupPlan:
    """Return the `GroupPlan` of the group of ranks ``index``; earlier groups' plans made ``a`` and ``b``."""
    cut_a, cut_b = a.cuts[index], b.cuts[index]
    dim_a = _gemm_dim(cut_a, a.ndim, "k", "m", transposed=gemm.a_transposed)
    dim_b = _gemm_dim(cut_b, b.ndim, "n", "k", transposed=gemm.b_transposed)
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
    return ndim - 1 if name == "a" or gemm.b_transposed else ndim - 2


def redistribute(gemm: Gemm, a: Part, b: Part) -> tuple[Part, Part, list[GroupPlan]]:
    """Gather or narrow both operands as this module's table says; return both, and each group's `GroupPlan`."""
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
    return redistribute(gemm, *without_data)[2]
