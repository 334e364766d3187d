"""fp8compile::group_cast_transpose: quantize groups of tokens along rows and along tokens, by one kernel on a GPU.

Rows after the last group get codes along rows, but none along tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.cast_transpose import along_rows, is_pair
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.group_quantize import empty_outputs, group_quantize
from fp8compile.ops.groups.kernel_support import has_block_kernel
from fp8compile.ops.groups.padding import alignment
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer

__all__ = ["group_cast_transpose", "is_group_pair"]


def is_group_pair(rows: Quantizer | None, columns: Any) -> bool:
    """Whether the GPU kernel can quantize a group along rows by ``rows`` and along tokens by ``columns``."""
    return is_pair(rows, columns) and has_block_kernel(columns)


def _fake(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = rows.scale_shape(x.shape)[1]
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty((blocks, x.shape[0]), dtype=rows.scale_dtype()).t(),  # grouped GEMMs read scales column by column
        *empty_outputs(x, offsets, columns),
    )


def _two_casts(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *along_rows(x, rows, PYTHON_OF_STEPS), *group_quantize(x, offsets, columns)


def _launch(results: Any, x: Tensor, offsets: Tensor, rows: Any, columns: Any) -> Any:
    from fp8compile.kernels.group_cast_transpose import groups_both_directions

    if not is_group_pair(rows, columns):
        raise ValueError(
            f"fp8compile::group_cast_transpose: quantizers are {rows!r} and {columns!r}; on a GPU they must be "
            "CurrentScaling with rounding='nearest' and blocks (1, n) and (n, 1), where n divides 128. Quantize "
            "along rows and along tokens with two calls."
        )
    return groups_both_directions(x, offsets, rows, columns, alignment(columns), results)


group_cast_transpose: OpOverload = register_group_op(
    "fp8compile::group_cast_transpose", _two_casts, fake=_fake, portable=ON_GPU, launch=_launch
)
