"""Sample arguments of the ops over groups of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.group_outer_amaxes import DIRECTIONS, group_outer_amaxes
from fp8compile.ops.quantize_weight import COLUMNS, ROWS
from fp8compile.quantizers import CurrentScaling, Recipe, TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.testing.samples import inputs
from fp8compile.testing.samples.inputs import tokens

__all__ = ["SAMPLES"]


def _checked_offsets() -> Iterator[tuple[Any, ...]]:
    for offsets in inputs.offsets_of_groups():
        yield offsets, 12
    yield torch.empty(0, dtype=torch.int32), 12
    yield torch.arange(8, dtype=torch.int32)[::2], 12


def _group_amax() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=(-1, 1))
        yield x, offsets, CurrentScaling()


def _group_cast() -> Iterator[tuple[Any, ...]]:
    quantizers = (
        CurrentScaling(block=(-1, 1)),
        CurrentScaling(format="e5m2", scale="pow2"),
        CurrentScaling(block=(-1, 1), format="e5m2", rounding="stochastic", seed=1),
    )
    for x, offsets in tokens():
        for quantizer in quantizers:
            yield x, offsets, quantizer.multiplier(group_amax(x, offsets, quantizer)), quantizer


def _group_cast_transpose() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")
        line = CurrentScaling(block=(1, 32), format="e5m2", scale="e8m0_rceil")
        yield x, offsets, line, CurrentScaling(block=(32, 1), scale="e8m0_floor", eps=1e-6)


def _group_outer_amaxes() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of `group_outer_amaxes`."""
    noisy: dict[str, Any] = {"rounding": "stochastic", "seed": 3}
    line, pillar = TwoLevelScaling(**noisy), TwoLevelScaling(block=(GROUP, 1), packed="columns")
    for number, (x, offsets) in enumerate(tokens()):
        transformed = replace(pillar, hadamard=(1, -1) * 8, **noisy)
        yield x, offsets, line, transformed, DIRECTIONS[number % 3]
        yield x, offsets, *(replace(each, scale="torchao") for each in (line, pillar)), "both"


def _group_quantize() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=(16, 1))
        yield x, offsets, CurrentScaling(block=(32, 1), format="e5m2", scale="e8m0_rceil", eps=1e-6)


def _group_quantize_rows() -> Iterator[tuple[Any, ...]]:
    for x, offsets in tokens():
        yield x, offsets, CurrentScaling(block=ROWS), CurrentScaling(block=COLUMNS)
        line = CurrentScaling(block=ROWS, format="e5m2", scale="pow2", eps=1e-6)
        yield x, offsets, line, CurrentScaling(block=COLUMNS, format="e5m2")


def _group_quantize_two_levels() -> Iterator[tuple[Any, ...]]:
    for x, offsets, *how in _group_outer_amaxes():
        yield x, offsets, group_outer_amaxes(x, offsets, *how), *how


def _group_two_levels() -> Iterator[tuple[Any, ...]]:
    noisy: dict[str, Any] = {"rounding": "stochastic", "seed": 3}
    for x, offsets in tokens():
        yield x, offsets, TwoLevelScaling(packed="none", **noisy), False
        yield x, offsets, TwoLevelScaling(block=(16, 1), packed="none", hadamard=(1, -1) * 8, **noisy), True
        yield x, offsets, TwoLevelScaling(block=(16, 1), packed="none", scale="torchao"), True
    stack = torch.randn(48, 24, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([16, 48], dtype=torch.int32)
    yield stack, ends, TwoLevelScaling(block=(16, 16), packed="none"), False


def _routed_rows() -> Iterator[tuple[Any, ...]]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    for order in ([2, 0, 3, 1], [5, 0, 7, 1, 6, 2, 4, 3], []):
        pairs = torch.tensor(order, dtype=torch.int64)
        yield x[: len(order)], pairs, pairs.argsort(), Recipe()
    yield x.float()[:, :1], torch.arange(12).flip(0), torch.arange(12).flip(0), Recipe()


SAMPLES = {
    "fp8compile::checked_offsets": _checked_offsets,
    "fp8compile::group_amax": _group_amax,
    "fp8compile::group_cast": _group_cast,
    "fp8compile::group_cast_transpose": _group_cast_transpose,
    "fp8compile::group_outer_amaxes": _group_outer_amaxes,
    "fp8compile::group_quantize": _group_quantize,
    "fp8compile::group_quantize_rows": _group_quantize_rows,
    "fp8compile::group_quantize_two_levels": _group_quantize_two_levels,
    "fp8compile::group_two_levels": _group_two_levels,
    "fp8compile::routed_rows": _routed_rows,
}
