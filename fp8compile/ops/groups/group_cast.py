"""fp8compile::group_cast: cast tokens by their groups' multipliers (1 / scale) to transposed codes.

Each group's columns are padded. On a GPU the op is one Triton kernel. On a CPU it calls the quantizer's ``cast`` for
each group's rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.cast import empty_codes
from fp8compile.ops.groups.export_masks import OF_BACKWARD
from fp8compile.ops.groups.kernel_support import check_has_kernel
from fp8compile.ops.groups.padding import alignment, padded_length, spans
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer

__all__ = ["group_cast"]


def _fake(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    columns = padded_length(x.shape[0], offsets.shape[0], alignment(quantizer))
    return empty_codes(x, quantizer, columns)


def _group_by_group(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    codes = _fake(x, offsets, multiplier, quantizer).zero_()
    for group, (rows, columns) in enumerate(spans(offsets, alignment(quantizer))):
        codes[:, columns] = PYTHON_OF_STEPS.cast(x[rows], multiplier[group : group + 1], quantizer).t()
    return codes


def _launch(results: tuple[Tensor, ...], x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Any) -> Any:
    from fp8compile.kernels.group_amax_and_cast import cast_groups

    check_has_kernel("group_cast", quantizer)
    return cast_groups(x, offsets, multiplier, quantizer, alignment(quantizer), *results)


group_cast: OpOverload = register_group_op(
    "fp8compile::group_cast",
    _group_by_group,
    fake=_fake,
    portable=OF_BACKWARD,
    launch=_launch,
    strided=(0, 2),
)
