"""fp8compile::cast: multiply values by their block's multiplier (1 / scale), and round to codes.

With ``again``, the codes are computed anew. Compilers merge equal calls of one op, and would keep the forward's codes,
one byte per element, until the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops import quantization_steps
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Split, grid_cuts
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import shape_said

__all__ = ["cast", "empty_codes"]


def empty_codes(x: Tensor, quantizer: Quantizer, columns: int | None = None) -> Tensor:
    """Make an uninitialized uint8 tensor for the codes of ``x``.

    With ``columns``, the codes of a matrix (R, K) are transposed, and R is padded to ``columns``: (K, columns).
    """
    shape = shape_said(quantizer, "codes_shape", x.shape if columns is None else (columns, x.shape[1]))
    return x.new_empty(shape if columns is None else shape[::-1], dtype=torch.uint8)


def _fake(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Any) -> Tensor:
    return empty_codes(x, quantizer)


def _sharding(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Any) -> list[Split]:
    packs = shape_said(quantizer, "codes_shape", x.shape) != tuple(x.shape)
    if packs or not quantizer.is_local():
        return []
    whole = (None,) * (1 + len(where))
    return [Split((cut, grid, *whole), (cut.dim,)) for cut, grid in grid_cuts(x.shape, quantizer.block)]


def _cast(
    x: Tensor,
    multiplier: Tensor,
    quantizer: Quantizer,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    again: bool = False,
) -> Tensor:
    return quantization_steps.cast(x, multiplier, quantizer, rows, columns)


def _decompose(
    x: Tensor, multiplier: Tensor, quantizer: Quantizer, rows: Any = None, columns: Any = None, again: Any = False
) -> Tensor:
    return quantization_steps.cast(rounded(x, apart=again), multiplier, quantizer, rows, columns)


cast: OpOverload = register_op(
    "fp8compile::cast", _cast, fake=_fake, backward=None, decompose=_decompose, sharding=_sharding
)
