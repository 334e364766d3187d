"""Sample arguments of the ops that quantize tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.quantizers import CurrentScaling, TwoLevelScaling
from fp8compile.testing.samples import inputs

__all__ = ["SAMPLES"]

ROWS, COLUMNS = (1, -1), (-1, 1)


def _amax() -> Iterator[tuple[Any, ...]]:
    for x in inputs.matrices():
        for quantizer in inputs.quantizers():
            yield x, quantizer


def _cast() -> Iterator[tuple[Any, ...]]:
    for x in inputs.matrices():
        for quantizer in inputs.quantizers():
            for again in (False, True):
                yield x, quantizer.multiplier(quantizer.amax(x)), quantizer, None, None, again
            if x.ndim == 2 and not quantizer.is_local():  # a part that begins at row 3, column 5 of 100
                rows, columns = (torch.arange(size) for size in x.shape)
                yield x, quantizer.multiplier(quantizer.amax(x)), quantizer, (rows + 3) * 100, columns + 5


def _cast_transpose() -> Iterator[tuple[Any, ...]]:
    pairs = [
        (CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")),
        (
            CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
            CurrentScaling(block=(32, 1), scale="e8m0_floor", format="e5m2"),
        ),
    ]
    for x in inputs.matrices():
        if x.ndim == 2:
            for rows, columns in pairs:
                yield x, rows, columns
    yield torch.randn(3, 20, 40), *pairs[0]


def _dequantize() -> Iterator[tuple[Any, ...]]:
    for x in inputs.matrices():
        for quantizer in inputs.quantizers():
            multiplier = quantizer.multiplier(quantizer.amax(x))
            yield quantizer.cast(x, multiplier), quantizer.scale_of(multiplier), quantizer, x.dtype, None
        for quantizer in inputs.two_level_quantizers():
            own, amax = quantizer.for_shape(x.shape), quantizer.amax(x)
            outer_amax = own.outer_amax(amax)
            scale, outer_scale = own.block_scale(amax, outer_amax), own.outer_scale(outer_amax)
            yield own.cast(x, own.multiplier(amax)), scale, own, x.dtype, outer_scale


def _outer_amaxes() -> Iterator[tuple[Any, ...]]:
    row, pillar = TwoLevelScaling(), TwoLevelScaling(block=(16, 1), packed="columns")
    turned = TwoLevelScaling(block=(16, 1), packed="columns", hadamard=(1, -1) * 8)
    for x in inputs.matrices():
        if x.ndim == 2:
            yield x, row, pillar
            yield x, row, turned


def _outer_amax() -> Iterator[tuple[Any, ...]]:
    special = torch.tensor([[0.0, 1e-45, 1e-39, 448.0], [3.4e38, torch.inf, torch.nan, 1.75]])
    for quantizer in inputs.two_level_quantizers():
        for amax in (special[:, :4:3], special, special.t(), special[:0], special[0]):
            yield amax, quantizer


def _two_scales() -> Iterator[tuple[Any, ...]]:
    for amax, quantizer in _outer_amax():
        yield amax, quantizer.outer_amax(amax), quantizer


def _quantize_columns() -> Iterator[tuple[Any, ...]]:
    quantizers = (
        CurrentScaling(block=(16, 1), scale="pow2"),
        CurrentScaling(block=(32, 1), scale="e8m0_floor", format="e5m2"),
    )
    for x in inputs.matrices():
        if x.ndim == 2:
            for quantizer in quantizers:
                yield x, quantizer
    yield torch.randn(3, 20, 40, generator=torch.Generator().manual_seed(0)), quantizers[0]


def _quantize_two_levels() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    noisy: dict[str, Any] = {"rounding": "stochastic", "seed": 5}
    for shape, dtype in (((16, 32), torch.bfloat16), ((48, 144), torch.float32), ((0, 16), torch.float16)):
        for turned in (
            TwoLevelScaling(block=(16, 1), packed="columns"),
            TwoLevelScaling(block=(16, 1), packed="columns", hadamard=(1, -1) * 8, **noisy),
        ):
            # a new matrix for each pair: Inductor can't compile two maxima of one matrix for a CPU (docs/upstream.md)
            x = torch.randn(shape[::-1], generator=generator).to(dtype).t()
            rows = TwoLevelScaling(rounding=turned.rounding, seed=turned.seed)
            amaxes = (each.outer_amax(each.amax(x)).clone() for each in (rows, turned))
            yield x, *amaxes, rows, turned


def _quantize_weight() -> Iterator[tuple[Any, ...]]:
    row, column = CurrentScaling(block=ROWS), CurrentScaling(block=COLUMNS, format="e5m2")
    square = CurrentScaling(block=(16, 16), scale="pow2")
    for x in inputs.matrices():
        if x.ndim == 2:
            yield x, row, column
            yield x, square, square


def _scale() -> Iterator[tuple[Any, ...]]:
    special = torch.tensor([[0.0, 1e-45, 1e-39, 448.0], [3.4e38, torch.inf, torch.nan, 1.75]])
    for quantizer in inputs.quantizers():
        yield special, quantizer
        yield special.t(), quantizer
        yield special[:0], quantizer


SAMPLES = {
    "fp8compile::amax": _amax,
    "fp8compile::cast": _cast,
    "fp8compile::cast_transpose": _cast_transpose,
    "fp8compile::dequantize": _dequantize,
    "fp8compile::outer_amaxes": _outer_amaxes,
    "fp8compile::outer_amax": _outer_amax,
    "fp8compile::two_scales": _two_scales,
    "fp8compile::quantize_columns": _quantize_columns,
    "fp8compile::quantize_two_levels": _quantize_two_levels,
    "fp8compile::quantize_weight": _quantize_weight,
    "fp8compile::scale": _scale,
}
