"""fp8compile::cast_transpose: codes and scales of a matrix along rows and along columns, by one read.

A gradient is multiplied along rows for grad_input and along columns for grad_weight. Inductor would read the matrix
twice for each of the two casts. On a GPU this op is one Triton kernel. On a CPU, and as the reference, it runs the two
casts. Stacked matrices (E, M, K) are quantized one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.kernels.programs import TILE
from fp8compile.ops.quantization_steps import Steps
from fp8compile.ops.quantize_columns import cast_along_columns, empty_columns, is_along_columns
from fp8compile.ops.registry import register_kernel_op
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.ops.traced_steps import OPS_OF_STEPS
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = ["along_rows", "empty_outputs", "is_pair", "cast_transpose", "two_casts"]

LARGEST_BLOCK = TILE


def is_pair(rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether the GPU kernel can quantize by ``rows`` and by ``columns`` in one read.

    The kernel takes `CurrentScaling` that rounds to nearest, with blocks (1, n) and (n, 1), where n divides 128.
    """
    if type(rows) is not CurrentScaling or rows.rounding != "nearest":
        return False
    return is_along_columns(columns) and rows.block == columns.block[::-1]  # type: ignore[union-attr]


def empty_outputs(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make uninitialized codes and scales along rows and along columns, in the layouts that GEMMs read.

    Scales along rows and codes along columns are column-major.
    """
    *stack, m, k = x.shape
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty((rows.scale_shape((m, k))[1], *stack, m), dtype=rows.scale_dtype()).movedim(0, -1),
        *empty_columns(x, columns),
    )


def along_rows(x: Tensor, quantizer: Quantizer, steps: Steps) -> tuple[Tensor, Tensor]:
    """Quantize a matrix in blocks along rows; returns codes, and scales in column-major order for GEMMs.

    ``steps`` are the functions that compute amax, scale and codes.
    """
    multiplier, found = steps.scale(steps.amax(x, quantizer), quantizer)
    return steps.cast(x, multiplier, quantizer), found.t().contiguous().t()


def two_casts(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize along rows, then along columns: the reference of the GPU kernel.

    Results are codes and scales along rows and along columns, in the layouts of `empty_outputs`.
    """
    along_columns = cast_along_columns(x, columns)
    if x.ndim == 2:
        return *along_rows(x, rows, OPS_OF_STEPS), *along_columns
    codes, scales = zip(*(along_rows(matrix, rows, OPS_OF_STEPS) for matrix in x), strict=True)
    return torch.stack(codes), torch.stack([each.t() for each in scales], dim=1).movedim(0, -1), *along_columns


def _launch(results: tuple[Tensor, ...], x: Tensor, rows: Any, columns: Any) -> Any:
    from fp8compile.kernels.both_directions import both_directions

    return both_directions(x, rows, columns, results)


def _sharding(x: Tensor, rows: Quantizer, columns: Quantizer) -> list[Split]:
    units = (*[1] * (x.ndim - 2), rows.block[1], rows.block[1])
    return [Split((Cut(dim, unit), None, None), (dim, dim, dim, dim)) for dim, unit in enumerate(units)]


cast_transpose: OpOverload = register_kernel_op(
    "fp8compile::cast_transpose", two_casts, fake=empty_outputs, launch=_launch, sharding=_sharding
)
