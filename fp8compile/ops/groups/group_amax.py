"""fp8compile::group_amax: the largest magnitude in each group, or in each column of each group.

On a GPU the op is one Triton kernel. On a CPU it calls the quantizer's ``amax`` for each group's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.amax import empty_grid
from fp8compile.ops.groups.export_masks import masks_of_groups
from fp8compile.ops.groups.kernel_support import check_has_kernel
from fp8compile.ops.groups.padding import spans
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer

__all__ = ["group_amax"]


def _fake(x: Tensor, offsets: Tensor, quantizer: Quantizer) -> Tensor:
    return empty_grid(x, quantizer, offsets.shape[0])


def _group_by_group(x: Tensor, offsets: Tensor, quantizer: Quantizer) -> Tensor:
    return torch.cat([PYTHON_OF_STEPS.amax(x[rows], quantizer) for rows, _ in spans(offsets, 1)])


def _portable(x: Tensor, offsets: Tensor, quantizer: Quantizer) -> Tensor:
    masks = masks_of_groups(offsets, x.shape[0])
    return torch.cat([PYTHON_OF_STEPS.amax(torch.where(own, x, 0), quantizer) for own in masks])


def _launch(results: tuple[Tensor, ...], x: Tensor, offsets: Tensor, quantizer: Any) -> Any:
    from fp8compile.kernels.group_amax_and_cast import amax_of_groups

    check_has_kernel("group_amax", quantizer)
    return amax_of_groups(x, offsets, quantizer, *results)


group_amax: OpOverload = register_group_op(
    "fp8compile::group_amax", _group_by_group, fake=_fake, portable=_portable, launch=_launch
)
