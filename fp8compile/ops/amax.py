"""fp8compile::amax: the largest magnitude of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops import quantization_steps
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Split, grid_cuts
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import shape_said

__all__ = ["amax", "empty_grid"]


def empty_grid(x: Tensor, quantizer: Quantizer, groups: int | None = None) -> Tensor:
    """Make an uninitialized float32 tensor for the amaxes of ``x``, with an entry for each block.

    With ``groups``, the number of groups of rows, each group has a row of amaxes: (groups, columns of the grid).
    """
    shape = shape_said(quantizer, "scale_shape", x.shape)
    return x.new_empty(shape if groups is None else (groups, shape[-1]), dtype=torch.float32)


def _sharding(x: Tensor, quantizer: Quantizer) -> list[Split]:
    cuts = grid_cuts(x.shape, quantizer.block)
    return [Split((cut, None), ("max" if grid is None else grid.dim,)) for cut, grid in cuts]


amax: OpOverload = register_op(
    "fp8compile::amax",
    quantization_steps.amax,
    fake=empty_grid,
    backward=None,
    decompose=lambda x, quantizer: quantization_steps.amax(rounded(x), quantizer),
    sharding=_sharding,
)
