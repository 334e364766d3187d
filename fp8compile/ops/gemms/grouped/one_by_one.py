"""Group by group, by the GEMM that multiplies two matrices: on a CPU, where sizes of groups can be read.

A GPU would have to wait for them. If emulation is asked for, it multiplies all rows by each group's matrix in float64
and keeps those of the group: right, and slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops.gemm import Operand, multiply
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped.kernel import GroupedGemm, GroupedOperand
from fp8compile.ops.gemms.kernel import GemmProblem
from fp8compile.ops.groups.layout import alignment, padded_offsets
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["ONE_BY_ONE", "groups_of"]


def groups_of(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each group's number, first row and end. It reads data, so it is for the CPU."""
    start = 0
    for group, end in enumerate(offsets.tolist()):
        yield group, start, end
        start = end


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return True


def _lacks(problem: GemmProblem) -> str | None:
    if problem.target.type == "cuda" and problem.config.emulate:
        return "has no emulation of grouped products on a GPU. Multiply group by group with fp8compile.linear there."
    return EMULATED.lacks(problem)


def _rows(a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = a.codes.new_zeros((a.codes.shape[0], b.codes.shape[1]), dtype=out_dtype)
    is_one_block = a.quantizer.block[0] == -1
    for group, start, end in groups_of(offsets):
        if start == end:
            continue
        scale = a.scale[start : start + 1 if is_one_block else end]
        left = Operand(codes=a.codes[start:end], scale=scale, quantizer=a.quantizer)
        right = Operand(codes=b.codes[group], scale=b.scale[group], quantizer=b.quantizer)
        product[start:end] = multiply(left, right.t(), out_dtype, config)
    return product


def _columns(operand: GroupedOperand, group: int, first: int, rows: int) -> Operand:
    """One group's codes as (tokens, features), in the layout that a layer without groups has them."""
    codes = operand.codes[:, first : first + rows].t().contiguous()
    block = operand.quantizer.block[0]
    grid = slice(group, group + 1) if block == -1 else slice(first // block, -(-(first + rows) // block))
    return Operand(codes=codes, scale=operand.scale[grid], quantizer=operand.quantizer)


def _outer(
    a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig
) -> Tensor:
    product = a.codes.new_zeros((offsets.shape[0], a.codes.shape[0], b.codes.shape[0]), dtype=out_dtype)
    ends = [padded_offsets(offsets, alignment(each.quantizer)).tolist() for each in (a, b)]
    firsts = [[0, *each] for each in ends]
    for group, start, end in groups_of(offsets):
        left, right = (
            _columns(operand, group, first[group], end - start) for operand, first in zip((a, b), firsts, strict=True)
        )
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
