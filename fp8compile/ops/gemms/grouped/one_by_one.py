"""A CPU multiplies one group after the other, by the GEMM of two matrices: it can read the sizes of the groups.

A GPU would have to wait for them, so it has no emulation of grouped products, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops.gemm import Operand, multiply
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped.kernel import GroupedGemm, GroupedOperand
from fp8compile.ops.gemms.kernel import GemmProblem
from fp8compile.ops.groups.layout import alignment
from fp8compile.ops.groups.spans import spans
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["ONE_BY_ONE"]


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return True


def _lacks(problem: GemmProblem) -> str | None:
    if problem.target.type == "cuda" and problem.config.emulate:
        return "has no emulation of grouped products on a GPU. Multiply group by group with fp8compile.linear there."
    return EMULATED.lacks(problem)


def _rows(a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = a.codes.new_zeros((a.codes.shape[0], b.codes.shape[1]), dtype=out_dtype)
    is_one_block = a.quantizer.block[0] == -1
    for group, (rows, _) in enumerate(spans(offsets, 1)):
        if rows.start == rows.stop:
            continue
        scale = a.scale[rows][:1] if is_one_block else a.scale[rows]
        left = Operand(codes=a.codes[rows], scale=scale, quantizer=a.quantizer)
        right = Operand(codes=b.codes[group], scale=b.scale[group], quantizer=b.quantizer)
        product[rows] = multiply(left, right.t(), out_dtype, config)
    return product


def _tokens_of_groups(operand: GroupedOperand, offsets: Tensor) -> Iterator[Operand]:
    """Each group's codes as (tokens, features), in the layout that a layer without groups has them."""
    block = operand.quantizer.block[0]
    for group, (_, columns) in enumerate(spans(offsets, alignment(operand.quantizer))):
        codes = operand.codes[:, columns].t().contiguous()
        blocks = slice(group, group + 1) if block == -1 else slice(columns.start // block, -(-columns.stop // block))
        yield Operand(codes=codes, scale=operand.scale[blocks], quantizer=operand.quantizer)


def _outer(
    a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig
) -> Tensor:
    product = a.codes.new_zeros((offsets.shape[0], a.codes.shape[0], b.codes.shape[0]), dtype=out_dtype)
    groups = zip(_tokens_of_groups(a, offsets), _tokens_of_groups(b, offsets), strict=True)
    for group, (left, right) in enumerate(groups):
        product[group] = multiply(left.t(), right, out_dtype, config)
    return product


ONE_BY_ONE = GroupedGemm(
    name="one_by_one",
    detail="group by group",
    takes=_takes,
    lacks=_lacks,
    rows=_rows,
    outer=_outer,
    is_opaque=True,
)
