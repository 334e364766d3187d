"""fp8compile::quantize_weight: a weight's codes and scales, and its amaxes for grad_input.

With one scale for each row, the backward's cast needs the amax of each column; Inductor would read the weight again to
compute it. On a GPU this op is one Triton kernel that reads the weight once. On a CPU, and as the reference, it runs
the quantizers' steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.cast_transpose import LARGEST_BLOCK
from fp8compile.ops.registry import register_kernel_op
from fp8compile.ops.scale import scale
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = ["is_weight_pair", "quantize_weight", "step_by_step"]

WIDEST = 1 << 14  # the longest row that the kernel can hold in registers

ROWS, COLUMNS = (1, -1), (-1, 1)


def is_weight_pair(first: Quantizer | None, again: Quantizer | None, columns: int) -> bool:
    """Whether the GPU kernel can quantize by ``first`` and compute the amaxes for the backward's quantizer ``again``.

    Both are `CurrentScaling`, and ``first`` rounds to nearest. Either both have the same square block, whose side
    divides 128; or ``first`` has a scale for each row, ``again`` for each column, and a row of ``columns`` elements
    fits into registers.
    """
    if type(first) is not CurrentScaling or type(again) is not CurrentScaling or first.rounding != "nearest":
        return False
    if (first.block, again.block) == (ROWS, COLUMNS):
        return _compat.statically_true(columns <= WIDEST)
    n = first.block[0]
    return first.block == again.block == (n, n) and n > 1 and LARGEST_BLOCK % n == 0


def _fake(weight: Tensor, first: Quantizer, again: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    return (
        weight.new_empty(weight.shape, dtype=torch.uint8),
        weight.new_empty(first.scale_shape(weight.shape), dtype=first.scale_dtype()),
        weight.new_empty(again.scale_shape(weight.shape), dtype=torch.float32),
    )


def step_by_step(weight: Tensor, first: Quantizer, again: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Run the quantizers' steps; returns codes and scales by ``first``, and amaxes for ``again``.

    ``first`` is the forward's quantizer, ``again`` the backward's. This is the reference of the GPU kernel.
    """
    multiplier, own_scale = scale(amax(weight, first), first)
    return cast(weight, multiplier, first), own_scale, amax(weight, again)


def _launch(results: Any, weight: Tensor, first: Any, again: Quantizer) -> Any:
    from fp8compile.kernels.group_quantize_rows import rows_of_groups
    from fp8compile.kernels.quantize_weight import square_blocks

    if first.block == ROWS:
        return rows_of_groups(weight, None, first, results)
    return square_blocks(weight, first, results)


# no sharding rule: layers whose weight is spread over ranks call the single steps instead
quantize_weight: OpOverload = register_kernel_op(
    "fp8compile::quantize_weight", step_by_step, fake=_fake, launch=_launch
)
