"""fp8compile::quantize_columns: quantize a matrix along columns, by one read of the matrix.

grad_input multiplies a weight along columns. Inductor would read the weight twice, for amaxes and for codes. On a GPU
this op is one Triton kernel; on a CPU, and as the reference, it runs the steps. A stack (E, M, K) is quantized matrix
by matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.kernels.programs import TILE
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.registry import register_kernel_op
from fp8compile.ops.scale import scale
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = [
    "cast_along_columns",
    "empty_columns",
    "is_along_columns",
    "quantize_columns",
]


def is_along_columns(quantizer: Quantizer | None) -> bool:
    """Whether the GPU kernel takes the quantizer: `CurrentScaling` that rounds to nearest, with blocks (n, 1).

    n divides 128 and is not 1.
    """
    if type(quantizer) is not CurrentScaling or quantizer.rounding != "nearest":
        return False
    n = quantizer.block[0]
    return quantizer.block == (n, 1) and n > 1 and TILE % n == 0


def empty_columns(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Make uninitialized codes, column-major as GEMMs read them, and scales."""
    *stack, m, k = x.shape
    codes = x.new_empty((*stack, k, m), dtype=torch.uint8).transpose(-2, -1)
    return codes, x.new_empty((*stack, quantizer.scale_shape((m, k))[0], k), dtype=quantizer.scale_dtype())


def cast_along_columns(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Quantize by the single steps, into the layouts of `empty_columns`: the reference of the GPU kernel."""
    if x.ndim == 3:
        codes, scales = zip(*(cast_along_columns(matrix, quantizer) for matrix in x), strict=True)
        return torch.stack([each.t() for each in codes]).transpose(-2, -1), torch.stack(scales)
    multiplier, found = scale(amax(x, quantizer), quantizer)
    return cast(x, multiplier, quantizer).t().contiguous().t(), found


def _launch(results: tuple[Tensor, ...], x: Tensor, quantizer: Any) -> Any:
    from fp8compile.kernels.both_directions import both_directions

    return both_directions(x, None, quantizer, (None, None, *results))


def _sharding(x: Tensor, quantizer: Quantizer) -> list[Split]:
    units = (*[1] * (x.ndim - 2), quantizer.block[0], 1)
    return [Split((Cut(dim, unit), None), (dim, dim)) for dim, unit in enumerate(units)]


quantize_columns: OpOverload = register_kernel_op(
    "fp8compile::quantize_columns",
    cast_along_columns,
    fake=empty_columns,
    launch=_launch,
    sharding=_sharding,
)
