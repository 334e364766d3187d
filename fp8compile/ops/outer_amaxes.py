"""fp8compile::outer_amaxes: a matrix's amax with and without a Hadamard transform.

Codes with two levels of scales first need the amax of the whole tensor, so the tensor is read twice; this op is the
first read. On a GPU it is one Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload, guard_or_false
from fp8compile.ops.registry import register_kernel_op
from fp8compile.quantizers import Quantizer

__all__ = ["outer_amax_of_values", "outer_amaxes"]


def outer_amax_of_values(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the amax of a whole matrix after the quantizer's transform, (1,) float32."""
    return quantizer.outer_amax(quantizer.amax(x))


def _step_by_step(x: Tensor, rows: Quantizer, columns: Quantizer) -> Tensor:
    """Return the amaxes for both quantizers, (2,) float32.

    Blocks are (1, 16) and (16, 1). Only ``columns`` may have a transform. On a GPU, callers must pass a multiple of 16
    rows.
    """
    return torch.cat([outer_amax_of_values(x, each) for each in (rows, columns)])


def _fake(x: Tensor, rows: Quantizer, columns: Quantizer) -> Tensor:
    return x.new_empty((2,), dtype=torch.float32)


def _launch(results: tuple[Tensor, ...], x: Tensor, rows: Any, columns: Any) -> Any:
    if guard_or_false(x.numel() == 0):
        return None
    from fp8compile.kernels.group_quantize_two_levels import amaxes_of_groups

    return amaxes_of_groups(x, None, rows, columns, *results)


# no sharding rule: ranks run the single steps instead, and reduce outer amaxes between them
outer_amaxes: OpOverload = register_kernel_op("fp8compile::outer_amaxes", _step_by_step, fake=_fake, launch=_launch)
