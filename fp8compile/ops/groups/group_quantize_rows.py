"""fp8compile::group_quantize_rows: codes and scales of rows, and amaxes of each group's columns.

From these amaxes, a later cast makes an operand with one scale for each column of a group: tokens for grad_weight, or
stacked weights for grad_input. On a GPU the op is one Triton kernel that reads the rows once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.kernel_support import has_group_kernel
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.ops.quantize_weight import COLUMNS, ROWS, is_weight_pair
from fp8compile.quantizers import Quantizer

__all__ = ["QUANTIZE_ROWS", "group_quantize_rows", "is_row_pair"]


def is_row_pair(rows: Quantizer | None, columns: Any, width: int) -> bool:
    """Whether the GPU kernel can quantize rows of ``width`` values by ``rows`` and compute amaxes for ``columns``."""
    return is_weight_pair(rows, columns, width) and columns.block == COLUMNS and has_group_kernel(columns)


def _fake(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty(rows.scale_shape(x.shape), dtype=rows.scale_dtype()),
        x.new_empty((offsets.shape[0], columns.scale_shape(x.shape)[1]), dtype=torch.float32),
    )


def _step_by_step(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    multiplier, scale = PYTHON_OF_STEPS.scale(PYTHON_OF_STEPS.amax(x, rows), rows)
    return PYTHON_OF_STEPS.cast(x, multiplier, rows), scale, group_amax(x, offsets, columns)


def _launch(results: Any, x: Tensor, offsets: Tensor, rows: Any, columns: Quantizer) -> Any:
    from fp8compile.kernels.group_quantize_rows import rows_of_groups

    if not is_row_pair(rows, columns, x.shape[1]):
        raise ValueError(
            f"fp8compile::group_quantize_rows: quantizers are {rows!r} and {columns!r}, and x has {x.shape[1]} "
            f"columns; on a GPU they must be CurrentScaling with rounding='nearest' and blocks {ROWS} and {COLUMNS}, "
            "and x must have at most 16384 columns. Quantize rows and compute amaxes of groups with two calls."
        )
    return rows_of_groups(x, offsets, rows, results)


group_quantize_rows: OpOverload = register_group_op(
    "fp8compile::group_quantize_rows", _step_by_step, fake=_fake, portable=ON_GPU, launch=_launch
)


QUANTIZE_ROWS = inductor.once_a_graph(group_quantize_rows)
"""The op; in a graph, calls with equal arguments are one call."""
