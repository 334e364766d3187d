"""fp8compile::quantize_two_levels: four-bit codes of a matrix along rows and columns, by one read.

The NVFP4 version of `fp8compile.ops.cast_transpose`. Outer amaxes are arguments, because they must be known before the
first code is computed (`fp8compile.ops.outer_amaxes`). Scales are in tiles, the layout that a GPU's GEMM reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_kernel_op
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import tiled, tiles_numel

__all__ = [
    "by_outer_amax",
    "is_packed_pair",
    "quantize_two_levels",
]

Cast = tuple[Tensor, Tensor, Tensor]  # codes, scales of blocks, outer scale
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def is_packed_pair(rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether the GPU kernel can quantize by ``rows`` and by ``columns`` in one read.

    The kernel takes packed `TwoLevelScaling` with the same rule of scales, but not ``"reciprocal"``, and with blocks
    (1, 16) and (16, 1), without a transform along rows.
    """
    if type(rows) is not TwoLevelScaling or type(columns) is not TwoLevelScaling:
        return False
    if (rows.packed, columns.packed) != ("rows", "columns") or rows.scale != columns.scale or not rows.has_kernels():
        return False
    return (rows.block, columns.block) == ((1, GROUP), (GROUP, 1)) and not rows.hadamard


def _empty_outputs(x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer) -> Outputs:
    m, k = x.shape
    return (
        x.new_empty((m, k // 2), dtype=torch.uint8),
        x.new_empty((tiles_numel(m, k // GROUP),), dtype=torch.uint8),
        torch.empty_like(row_amax),
        x.new_empty((k, m // 2), dtype=torch.uint8).t(),
        x.new_empty((tiles_numel(k, m // GROUP),), dtype=torch.uint8),
        torch.empty_like(column_amax),
    )


def by_outer_amax(x: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> Cast:
    """Quantize a matrix by a known outer amax; return codes, scales of blocks and the outer scale.

    ``outer_amax`` is the amax of the whole matrix after the quantizer's transform, (1,) float32.
    """
    outer = quantizer.outer_scale(outer_amax)
    scale = quantizer.block_scale(quantizer.amax(x), outer_amax)
    return quantizer.cast(x, quantizer.block_multiplier(scale, outer)), scale, outer


def _laid_out(found: Cast, quantizer: Quantizer) -> Cast:
    """Return codes, scales in tiles and the outer scale of a cast, in the layout of the op's results."""
    codes, scale, outer = found
    if quantizer.block[0] == 1:
        return codes.contiguous(), tiled(scale).reshape(-1), outer
    return codes.t().contiguous().t(), tiled(scale.t()).reshape(-1), outer


def _step_by_step(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales in 128 x 4 tiles and the outer scale along rows, then the same along columns.

    ``x`` is (M, K), both multiples of 16. ``row_amax`` and ``column_amax`` are the whole matrix's amaxes for codes
    along rows and along columns, (1,) float32. Codes along columns are column-major.
    """
    along_rows, along_columns = by_outer_amax(x, row_amax, rows), by_outer_amax(x, column_amax, columns)
    return *_laid_out(along_rows, rows), *_laid_out(along_columns, columns)


def _launch(results: Any, x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Any, columns: Any) -> Any:
    if _compat.guard_or_false(x.numel() == 0):
        return None
    from fp8compile.kernels.quantize_two_levels import both_packed

    return both_packed(x, (row_amax, column_amax), rows, columns, results)


# no sharding rule: ranks can't cut packed codes
quantize_two_levels: OpOverload = register_kernel_op(
    "fp8compile::quantize_two_levels", _step_by_step, fake=_empty_outputs, launch=_launch
)
