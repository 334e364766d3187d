"""fp8compile::group_quantize_rows: codes and scales of rows, and amaxes of each group's columns.

From these amaxes, a later cast makes an operand with one scale for each column of a group: tokens for grad_weight, or
stacked weights for grad_input. On a GPU the op is one Triton kernel that reads the rows once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import inductor
from fp8compile.inductor import TileLaunch
from fp8compile.ops.counting_kernels import counts_of_groups, no_counts_of_groups
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.kernel_support import has_group_kernel
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.ops.quantize_weight import COLUMNS, ROWS, is_weight_pair
from fp8compile.ops.samples import tokens
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.target import target_of

__all__ = ["ROWS_ONCE", "group_quantize_rows", "group_quantize_rows_counted", "is_row_pair"]


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


def _launch(x: Tensor, offsets: Tensor, rows: Any, *, counts: bool = False) -> TileLaunch:
    from fp8compile.kernels.group_quantize_rows import rows_of_groups

    return rows_of_groups(x, offsets, rows, counts=counts)


def _launched(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, *counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_row_pair(rows, columns, x.shape[1]):
        raise ValueError(
            f"fp8compile::group_quantize_rows: quantizers are {rows!r} and {columns!r}, x is {x.shape[1]} wide; on a "
            f"GPU they are CurrentScaling with rounding='nearest' and blocks {ROWS} and {COLUMNS}, and x is at most "
            "16384 wide. Quantize rows and take amaxes of groups by two calls."
        )
    codes, scale, amax = outputs = _fake(x, offsets, rows, columns)
    amax.zero_()
    if x.numel():
        _launch(x, offsets, rows, counts=bool(counts))(x, offsets.contiguous(), codes, scale, amax, *counts)
    return outputs


def _kernel(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    how = x, offsets, rows, columns
    return _step_by_step(*how) if target_of(x.device).type == "cpu" else _launched(*how)


def _counted_fake(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_fake(x, offsets, rows, columns), no_counts_of_groups(offsets, 1)


def _counted_kernel(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `group_quantize_rows` and count statistics of E groups, (1, 3, E) (`fp8compile.ops.counting_kernels`)."""
    if target_of(x.device).type == "cpu":
        return *_step_by_step(x, offsets, rows, columns), counts_of_groups(x, offsets, (rows,))
    counts = no_counts_of_groups(offsets, 1)
    return *_launched(x, offsets, rows, columns, counts), counts


def _samples() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=ROWS), CurrentScaling(block=COLUMNS)
        line = CurrentScaling(block=ROWS, format="e5m2", scale="pow2", eps=1e-6)
        yield x, offsets, line, CurrentScaling(block=COLUMNS, format="e5m2")


def _launch_in_graph(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> TileLaunch | None:
    return _launch(x, offsets, rows) if is_row_pair(rows, columns, x.shape[1]) else None


group_quantize_rows: OpOverload = register_group_op(
    "fp8compile::group_quantize_rows", _kernel, fake=_fake, portable=ON_GPU, samples=_samples, launch=_launch_in_graph
)


def _counted_launch_in_graph(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> TileLaunch | None:
    return _launch(x, offsets, rows, counts=True) if is_row_pair(rows, columns, x.shape[1]) else None


group_quantize_rows_counted: OpOverload = register_group_op(
    "fp8compile::group_quantize_rows_counted",
    _counted_kernel,
    fake=_counted_fake,
    portable=ON_GPU,
    samples=_samples,
    launch=_counted_launch_in_graph,
)
ROWS_ONCE = inductor.once_with_more(group_quantize_rows, group_quantize_rows_counted)
"""The op without counts (False) and with counts (True); in a graph, calls with equal arguments are one call."""
