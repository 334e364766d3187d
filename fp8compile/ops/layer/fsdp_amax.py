"""fp8compile::fsdp_amax: this rank's contribution to the amaxes of a weight that FSDP shards.

Before the layers run, ranks reduce the contributions of all layers in one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.layer.fsdp_rows import Rows, placed_cuts, rows_cut
from fp8compile.ops.layer.quantize_over_ranks import whole_amax
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Recipe

__all__ = ["fsdp_amax"]


def _kernel(shard: Tensor, dtype: torch.dtype, rows: Rows, grid: Sequence[int], role: str, recipe: Recipe) -> Tensor:
    """Compute this rank's contribution to the whole weight's amaxes, float32 of shape ``grid``.

    ``shard`` is cast to ``dtype``; ``role`` is the recipe's field, such as ``"weight"``.
    """
    part = Plain(shard.to(dtype), TensorLayout((*placed_cuts(rows.placed), rows_cut(rows))))
    return whole_amax(part, getattr(recipe, role)).clone()


def _fake(shard: Tensor, dtype: torch.dtype, rows: Rows, grid: Sequence[int], role: str, recipe: Recipe) -> Tensor:
    return shard.new_empty(tuple(grid), dtype=torch.float32)


fsdp_amax: OpOverload = register_op(
    "fp8compile::fsdp_amax",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_kernel,
    sharding=None,  # takes tensors of this rank alone, never DTensors
)
