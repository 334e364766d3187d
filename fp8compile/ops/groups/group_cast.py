"""fp8compile::group_cast: cast tokens by their groups' multipliers (1 / scale) to transposed codes.

Each group's columns are padded. On a GPU the op is one Triton kernel. On a CPU it calls the quantizer's ``cast`` for
each group's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from fp8compile.ops.cast import empty_codes
from fp8compile.ops.counting_kernels import counts_of_groups, no_counts_of_groups
from fp8compile.ops.groups.export_masks import OF_BACKWARD
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.kernel_support import check_has_kernel
from fp8compile.ops.groups.padding import alignment, padded_length, spans
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.ops.samples import tokens
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.target import target_of

__all__ = ["group_cast", "group_cast_counted"]


def _fake(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    columns = padded_length(x.shape[0], offsets.shape[0], alignment(quantizer))
    return empty_codes(x, quantizer, columns)


def _group_by_group(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    codes = _fake(x, offsets, multiplier, quantizer).zero_()
    for group, (rows, columns) in enumerate(spans(offsets, alignment(quantizer))):
        codes[:, columns] = PYTHON_OF_STEPS.cast(x[rows], multiplier[group : group + 1], quantizer).t()
    return codes


def _launched(
    x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer, counts: Tensor | None = None
) -> Tensor:
    check_has_kernel("group_cast", quantizer)
    codes = _fake(x, offsets, multiplier, quantizer)
    if codes.numel():
        from fp8compile.kernels.group_amax_and_cast import cast_groups

        current: Any = quantizer  # CurrentScaling
        cast_groups(x, offsets.contiguous(), multiplier, current, alignment(quantizer), codes, counts)
    return codes


def _kernel(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    how = x, offsets, multiplier, quantizer
    return _group_by_group(*how) if target_of(x.device).type == "cpu" else _launched(*how)


# ---------------------------------------------------------------------------------- with counts


def _counted_fake(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return _fake(x, offsets, multiplier, quantizer), no_counts_of_groups(offsets, 1)


def _counted_kernel(x: Tensor, offsets: Tensor, multiplier: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Run `group_cast` and count statistics of E groups, (1, 3, E) (`fp8compile.ops.counting_kernels`)."""
    how = x, offsets, multiplier, quantizer
    if target_of(x.device).type == "cpu":
        return _group_by_group(*how), counts_of_groups(x, offsets, (quantizer,), multiplier)
    counts = no_counts_of_groups(offsets, 1)
    return _launched(*how, counts), counts


def _samples() -> Iterator[tuple[Any, ...]]:
    quantizers = (
        CurrentScaling(block=(-1, 1)),
        CurrentScaling(format="e5m2", scale="pow2"),
        CurrentScaling(block=(-1, 1), format="e5m2", rounding="stochastic", seed=1),
    )
    for x, offsets in tokens():
        for quantizer in quantizers:
            yield x, offsets, quantizer.multiplier(group_amax(x, offsets, quantizer)), quantizer


group_cast: OpOverload = register_group_op(
    "fp8compile::group_cast", _kernel, fake=_fake, portable=OF_BACKWARD, samples=_samples
)
group_cast_counted: OpOverload = register_group_op(
    "fp8compile::group_cast_counted", _counted_kernel, fake=_counted_fake, portable=OF_BACKWARD, samples=_samples
)
