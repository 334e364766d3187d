"""Format of rows that are sent as codes: each row's codes and scales side by side, as bytes.

Rows are sent in their own dtype in two cases. Either a GEMM also reads the rows in high precision, so codes would be
an extra message; or the recipe has two levels of scales, so codes would first need the amax of an expert's rows on all
ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import guard_or_false
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer.operands import STEPS, Phase
from fp8compile.ops.layer.quantize_groups import by_row, cast_rows
from fp8compile.quantizers import TENSORS, Quantizer, Recipe

__all__ = ["packed", "sent_as", "unpacked", "wire_width"]

FLOAT16_MAX = torch.finfo(torch.float16).max


def sent_as(recipe: Recipe, role: str) -> Quantizer | None:
    """Return the quantizer with which rows are sent as codes; None if rows are sent in their own dtype.

    ``role`` is the recipe's field for the rows, ``"input"`` or ``"grad_output"``.
    """
    (roles,) = (each for each in TENSORS.values() if role in each)
    quantizers = [getattr(recipe, each) for each in roles]
    if any(each is None or each.has_outer_scale() for each in quantizers):
        return None
    return getattr(recipe, role)


def wire_width(features: int, quantizer: Quantizer) -> int:
    """Return the number of bytes of one row in a message: its codes and its scales."""
    of_rows = by_row(quantizer)
    scales = of_rows.scale_shape((1, features))[1] * of_rows.scale_dtype().itemsize
    return of_rows.codes_shape((1, features))[1] + scales


def packed(rows: Tensor, counts: Tensor, quantizer: Quantizer, group: str, phase: Phase) -> Tensor:
    """Quantize rows, and put each row's codes and scales side by side: (rows, `wire_width`) uint8.

    Rows are sorted by expert; ``counts``, (R, E), has the number of rows for each of E experts of each of R ranks. A
    tensorwise quantizer has one scale for an expert's rows on all ranks of ``group``; the scale is sent with each row.
    ``phase`` says whether the code runs in eager mode or is traced.
    """
    steps = STEPS[phase]
    if quantizer.block[0] == 1:
        multiplier, scale = steps.scale(steps.amax(rows, quantizer), quantizer)
        codes = steps.cast(rows, multiplier, quantizer)
    else:
        offsets = counts.flatten().cumsum(0, dtype=torch.int32)
        codes, scale = cast_rows(
            rows, offsets, quantizer, steps, lambda own: all_reduce_amax(own, group) if counts.shape[0] > 1 else own
        )
    return torch.cat((codes, _seen_as(scale, torch.uint8)), dim=1)


def unpacked(wire: Tensor, features: int, quantizer: Quantizer, dtype: torch.dtype) -> Tensor:
    """Dequantize rows that arrived as codes and scales, (rows, features); inverse of `packed`.

    ``wire`` are the rows as bytes, (rows, `wire_width`); ``dtype`` is the dtype of the result.
    """
    of_rows = by_row(quantizer)
    codes = of_rows.codes_shape((1, features))[1]
    scale = _seen_as(wire[:, codes:], of_rows.scale_dtype())
    # The quantizer's own method runs instead of the op fp8compile::dequantize, which ends in a rounding barrier: with
    # a barrier, each kernel that reads the values would first copy them. Readers of the values round them themselves.
    values = of_rows.dequantize(wire[:, :codes].contiguous(), scale)
    if dtype == torch.float16:  # with a power of two as scale, codes of the largest values may exceed float16
        values = values.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return values.to(dtype)


def _seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy rows and reinterpret their bytes as another dtype.

    A slice of a row may begin at any byte, so it is copied; the copy is flattened, because the view needs a last dim
    without gaps.
    """
    shape = x.shape[0], x.shape[1] * x.dtype.itemsize // dtype.itemsize
    if guard_or_false(x.shape[0] == 0):  # Inductor (2.11) can't view a tensor without rows as another dtype
        return x.new_empty(shape, dtype=dtype)
    return x.clone(memory_format=torch.contiguous_format).flatten().view(dtype).view(shape)
