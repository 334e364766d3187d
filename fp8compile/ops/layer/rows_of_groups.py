"""Codes of rows under one scale for each group: what a tensorwise quantizer makes of tokens sorted by group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.layout import group_to_read
from fp8compile.ops.layer.quantize_shard import Steps
from fp8compile.quantizers import Quantizer

__all__ = ["by_row", "quantize_rows_of_groups"]


def by_row(quantizer: Quantizer) -> Quantizer:
    """The quantizer of codes that come with a scale for each row, as GEMMs over groups read them."""
    return quantizer if quantizer.block[0] == 1 else replace(quantizer, block=(1, -1))


def quantize_rows_of_groups(
    x: Tensor,
    offsets: Tensor,
    quantizer: Quantizer,
    steps: Steps,
    all_ranks: Callable[[Tensor], Tensor] = lambda amaxes: amaxes,
) -> tuple[Tensor, Tensor]:
    """Codes (R, K) of rows, and for each row the scale of its group, (R, 1).

    Args:
        x: (R, K), sorted by group.
        offsets: Ends of the groups, (E,) int32.
        quantizer: One block for the rows of a group.
        steps: How amaxes become scales, and values codes.
        all_ranks: Makes of this rank's amaxes those of all ranks that have rows of the groups.
    """
    multipliers, scales = steps.scale(all_ranks(group_amax(x, offsets, quantizer)), quantizer)
    group = group_to_read(offsets, x.shape[0])
    return steps.cast(x, multipliers[group], by_row(quantizer)), scales[group]
