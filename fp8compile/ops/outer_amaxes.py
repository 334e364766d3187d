"""fp8compile::outer_amaxes: copy a matrix, and compute its amax with and without a Hadamard transform.

Codes with two levels of scales first need the amax of the whole tensor, so the tensor is read twice; this op is the
first read. On a GPU it is one Inductor kernel, which also computes the matrix, such as an activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import inductor
from fp8compile.ops import samples
from fp8compile.ops.registry import register_kernel_op
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP, factors

__all__ = ["outer_amax_of_values", "outer_amaxes"]


def outer_amax_of_values(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the amax of a whole matrix after the quantizer's transform, (1,) float32."""
    return quantizer.outer_amax(quantizer.amax(x))


def _step_by_step(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    of_rows, of_columns = (outer_amax_of_values(x, each).clone() for each in (rows, columns))
    return x.clone(memory_format=torch.contiguous_format), of_rows, of_columns


def _kernel(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Return a contiguous copy of the matrix, and its amax, (1,) float32, for each quantizer.

    Blocks are (1, 16) and (16, 1). Only ``columns`` may have a transform. On a GPU, callers must pass a multiple of 16
    rows.
    """
    return _step_by_step(x, rows, columns)


def _fake(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    one = (1,)
    return x.new_empty(x.shape), x.new_empty(one, dtype=torch.float32), x.new_empty(one, dtype=torch.float32)


def _lower(x: Any, rows: TwoLevelScaling, columns: TwoLevelScaling) -> tuple[Any, Any, Any]:
    kinds = [None, factors(columns.hadamard)] if columns.hadamard else [None]
    whole, largest = inductor.lower_largest_of_sums(x, GROUP, kinds)
    return whole, largest[0], largest[-1]


def _samples() -> Iterator[tuple[Any, ...]]:
    row, pillar = TwoLevelScaling(), TwoLevelScaling(block=(16, 1), packed="columns")
    turned = TwoLevelScaling(block=(16, 1), packed="columns", hadamard=(1, -1) * 8)
    for x in samples.matrices():
        if x.ndim == 2:
            yield x, row, pillar
            yield x, row, turned


# no sharding rule: ranks run the single steps instead, and reduce outer amaxes between them
outer_amaxes: OpOverload = register_kernel_op(
    "fp8compile::outer_amaxes", _kernel, _step_by_step, fake=_fake, samples=_samples
)
inductor.register_lowering(outer_amaxes, _lower)
