"""fp8compile::group_quantize: quantize groups of tokens in blocks along tokens, to transposed codes.

    tokens, blocks of 4     a a a a a a b b b b b . .
    columns of codes        a a a a a a 0 0 b b b b b 0 0 0
    rows of scales          a       a       b       b            the second block of a has 2 tokens, of b 1 token

Each group begins a new block. On a GPU the op is one Triton kernel. On a CPU it quantizes group by group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.cast import empty_codes
from fp8compile.ops.groups.export_masks import OF_BACKWARD
from fp8compile.ops.groups.kernel_support import check_has_kernel
from fp8compile.ops.groups.padding import alignment, padded_length, spans
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer

__all__ = ["empty_outputs", "group_quantize"]


def empty_outputs(x: Tensor, offsets: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Return uninitialized transposed codes (K, C) and scales (C / block, K) for tokens (R, K), padded to C."""
    columns = padded_length(x.shape[0], offsets.shape[0], alignment(quantizer))
    return (
        empty_codes(x, quantizer, columns),
        x.new_empty((columns // quantizer.block[0], x.shape[1]), dtype=quantizer.scale_dtype()),
    )


def _group_by_group(x: Tensor, offsets: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    codes, scales = empty_outputs(x, offsets, quantizer)
    codes.zero_()
    # a block of padding has the scale of values that are all 0
    scales.copy_(PYTHON_OF_STEPS.scale(x.new_zeros(scales.shape, dtype=torch.float32), quantizer)[1])
    for rows, columns in spans(offsets, alignment(quantizer)):
        amax = PYTHON_OF_STEPS.amax(x[rows], quantizer)
        multiplier, scale = PYTHON_OF_STEPS.scale(amax, quantizer)
        codes[:, columns] = PYTHON_OF_STEPS.cast(x[rows], multiplier, quantizer).t()
        first = columns.start // quantizer.block[0]
        scales[first : first + scale.shape[0]] = scale
    return codes, scales


def _launch(results: tuple[Tensor, ...], x: Tensor, offsets: Tensor, quantizer: Any) -> Any:
    from fp8compile.kernels.group_amax_and_cast import quantize_groups

    check_has_kernel("group_quantize", quantizer)
    return quantize_groups(x, offsets, quantizer, alignment(quantizer), *results)


group_quantize: OpOverload = register_group_op(
    "fp8compile::group_quantize",
    _group_by_group,
    fake=empty_outputs,
    portable=OF_BACKWARD,
    launch=_launch,
)
