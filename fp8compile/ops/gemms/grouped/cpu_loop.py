"""The grouped GEMM of a CPU: multiplies one group after the other with a GEMM for two matrices.

The loop reads the sizes of groups on the host. On a GPU the host would have to wait for these sizes, so there is no
emulation of grouped products on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.selection import multiply, selected_gemm
from fp8compile.ops.groups.export_masks import masks_of_groups
from fp8compile.ops.groups.group_two_levels import NO_GROUPS_OF_TWO_LEVELS, token_columns
from fp8compile.ops.groups.padding import alignment, spans
from fp8compile.quantizers import GemmConfig, Quantizer, transposed

__all__ = ["ONE_BY_ONE", "every_row"]


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return True


def _lacks(problem: GemmProblem) -> str | None:
    if problem.target.type == "cuda" and problem.a.has_outer_scale():
        return NO_GROUPS_OF_TWO_LEVELS
    if problem.target.type == "cuda" and problem.config.emulate:
        return "has no emulation of grouped GEMMs on a GPU. Call fp8compile.linear for each group instead."
    return EMULATED.lacks(problem)


def _outer_scales(operand: Quantized, groups: int) -> Sequence[Tensor | None]:
    return (None,) * groups if operand.outer_scale is None else operand.outer_scale.split(1)


def _rows(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    product = a.codes.new_zeros((a.codes.shape[0], b.codes.shape[1]), dtype=out_dtype)
    if 0 in b.codes.shape:
        return product
    turned, is_one_block = transposed(b.quantizer), a.quantizer.block[0] == -1
    gemm = selected_gemm(a.quantizer, turned, a.codes.device, out_dtype, config)
    codes, scales = b.codes.transpose(1, 2), b.scale.transpose(1, 2)
    outer, outer_of_matrices = _outer_scales(a, len(codes)), _outer_scales(b, len(codes))
    for group, (rows, _) in enumerate(spans(offsets, 1)):
        if rows.start == rows.stop:
            continue
        scale = a.scale[rows][:1] if is_one_block else a.scale[rows]
        left = Quantized(codes=a.codes[rows], scale=scale, quantizer=a.quantizer, outer_scale=outer[group])
        right = Quantized(
            codes=codes[group], scale=scales[group], quantizer=turned, outer_scale=outer_of_matrices[group]
        )
        product[rows] = gemm.multiply(left, right, out_dtype, config)
    return product


def every_row(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """Multiply each row of ``a`` by its group's matrix of ``b``, without reading ``offsets`` on the host.

    ``offsets`` are the ends of the groups of rows. All rows are multiplied by each matrix; a mask then selects the
    rows of the matrix's group.
    """
    count = a.codes.shape[0]
    product = a.codes.new_zeros((count, b.codes.shape[1]), dtype=out_dtype)
    if guard_or_false(count == 0):
        return product
    first = (torch.cat((offsets.new_zeros(1), offsets[:-1])) if offsets.shape[0] else offsets).clamp(max=count - 1)
    is_one_block = a.quantizer.block[0] == -1
    outer, outer_of_matrices = _outer_scales(a, len(b.codes)), _outer_scales(b, len(b.codes))
    for group, own in enumerate(masks_of_groups(offsets, count)):
        scale = a.scale.index_select(0, first[group : group + 1]) if is_one_block else a.scale
        left = Quantized(codes=a.codes, scale=scale, quantizer=a.quantizer, outer_scale=outer[group])
        right = Quantized(
            codes=b.codes[group], scale=b.scale[group], quantizer=b.quantizer, outer_scale=outer_of_matrices[group]
        )
        product = torch.where(own, multiply(left, right.t(), out_dtype, config), product)
    return product


def _tokens_of_groups(operand: Quantized, offsets: Tensor) -> Iterator[Quantized]:
    """Yield each group's part of an operand with transposed codes, turned back to a matrix (tokens, features).

    ``offsets`` are the ends of the groups among the tokens.
    """
    block, outer = operand.quantizer.block[0], _outer_scales(operand, len(offsets))
    for group, (_, columns) in enumerate(spans(offsets, alignment(operand.quantizer))):
        columns = token_columns(columns, operand.quantizer)
        codes = operand.codes[:, columns].t().contiguous()
        blocks = slice(group, group + 1) if block == -1 else slice(columns.start // block, -(-columns.stop // block))
        yield Quantized(
            codes=codes, scale=operand.scale[blocks], quantizer=operand.quantizer, outer_scale=outer[group]
        )


def _outer(a: Quantized, b: Quantized, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
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
