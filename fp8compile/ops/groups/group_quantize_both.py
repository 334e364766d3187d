"""fp8compile::group_quantize_both: quantize groups of tokens along rows and along tokens, by one kernel on a GPU.

Rows after the last group get codes along rows, but none along tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile.inductor import TileLaunch
from fp8compile.ops.counting_kernels import counts_of_groups, no_counts_of_groups
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.group_quantize import empty_outputs, group_quantize
from fp8compile.ops.groups.kernel_support import has_block_kernel
from fp8compile.ops.groups.padding import alignment, padded_length
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.ops.quantize_both import along_rows, is_pair
from fp8compile.ops.samples import tokens
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.target import target_of

__all__ = ["group_quantize_both", "group_quantize_both_counted", "is_group_pair"]


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


def _launch(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, *, counts: bool = False) -> TileLaunch:
    from fp8compile.kernels.group_quantize_both import groups_both_directions

    align = alignment(columns)
    length = padded_length(x.shape[0], offsets.shape[0], align)
    own: Any = rows  # CurrentScaling
    return groups_both_directions(x, offsets, length, own, columns, align, counts=counts)  # type: ignore[arg-type]


def _check(rows: Quantizer, columns: Quantizer) -> None:
    if not is_group_pair(rows, columns):
        raise ValueError(
            f"fp8compile::group_quantize_both: quantizers are {rows!r} and {columns!r}; on a GPU they are "
            "CurrentScaling with rounding='nearest' and blocks (1, n) and (n, 1), n a divisor of 128. Cast along rows "
            "and along tokens by two calls."
        )


def _launched(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, *counts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(rows, columns)
    codes, scale, token_codes, token_scale = outputs = _fake(x, offsets, rows, columns)
    if codes.numel() or token_codes.numel():
        contiguous = codes, scale.t(), token_codes, token_scale, *counts
        _launch(x, offsets, rows, columns, counts=bool(counts))(x, offsets.contiguous(), *contiguous)
    return outputs


def _kernel(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = x, offsets, rows, columns
    return _two_casts(*how) if target_of(x.device).type == "cpu" else _launched(*how)


def _counted_fake(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_fake(x, offsets, rows, columns), no_counts_of_groups(offsets, 2)


def _counted_kernel(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `group_quantize_both` and count statistics of E groups, (2, 3, E) (`fp8compile.ops.counting_kernels`)."""
    if target_of(x.device).type == "cpu":
        return *_two_casts(x, offsets, rows, columns), counts_of_groups(x, offsets, (rows, columns))
    counts = no_counts_of_groups(offsets, 2)
    return *_launched(x, offsets, rows, columns, counts), counts


def _samples() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")
        line = CurrentScaling(block=(1, 32), format="e5m2", scale="e8m0_rceil")
        yield x, offsets, line, CurrentScaling(block=(32, 1), scale="e8m0_floor", eps=1e-6)


def _launch_in_graph(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> TileLaunch | None:
    return _launch(x, offsets, rows, columns) if is_group_pair(rows, columns) else None


group_quantize_both: OpOverload = register_group_op(
    "fp8compile::group_quantize_both", _kernel, fake=_fake, portable=ON_GPU, samples=_samples, launch=_launch_in_graph
)


def _counted_launch_in_graph(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer) -> TileLaunch | None:
    return _launch(x, offsets, rows, columns, counts=True) if is_group_pair(rows, columns) else None


group_quantize_both_counted: OpOverload = register_group_op(
    "fp8compile::group_quantize_both_counted",
    _counted_kernel,
    fake=_counted_fake,
    portable=ON_GPU,
    samples=_samples,
    launch=_counted_launch_in_graph,
)
