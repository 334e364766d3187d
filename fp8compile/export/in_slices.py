"""Quantize a weight a few rows at a time, so that float32 intermediates need little memory.

    x (N, K) --rows of whole blocks--> amax of each slice --> grid --> scales --> codes of each slice, into one tensor

The codes have the same bits as if the whole weight were quantized at once: a block lies in one slice, or its amax is
the maximum over all slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import is_own

__all__ = ["IN_SLICES", "SLICE"]

SLICE = 2**18  # elements of a slice: 1 MiB in float32, a few of which are there at a time


def _slices(x: Tensor, quantizer: Quantizer, *, where: bool) -> Iterator[slice] | None:
    """Slices of rows, each with whole blocks; None if the weight is small, or if its rows can't be quantized apart."""
    if x.ndim != 2 or x.numel() <= SLICE or quantizer.transform() or not is_own(type(quantizer)):  # type: ignore[arg-type]
        return None
    if not quantizer.is_local() and not where:
        return None
    step = math.lcm(max(quantizer.block[0], 1), 2)  # two rows may share a byte
    rows = max(1, SLICE // max(1, x.shape[1]) // step) * step
    return (slice(first, min(first + rows, x.shape[0])) for first in range(0, x.shape[0], rows))


def _amax(x: Tensor, quantizer: Quantizer) -> Tensor:
    if (slices := _slices(x, quantizer, where=True)) is None:
        return PYTHON_OF_STEPS.amax(x, quantizer)
    found = [PYTHON_OF_STEPS.amax(x[rows], quantizer) for rows in slices]
    return torch.stack(found).amax(0) if quantizer.block[0] == -1 else torch.cat(found)


def _cast(x: Tensor, multiplier: Tensor, quantizer: Any, *where: Tensor) -> Tensor:
    if (slices := _slices(x, quantizer, where=bool(where))) is None:
        return PYTHON_OF_STEPS.cast(x, multiplier, quantizer, *where)
    block, codes = quantizer.block[0], None
    for rows in slices:
        grid = multiplier if block == -1 else multiplier[rows.start // block : -(-rows.stop // block)]
        places = (where[0][rows], where[1]) if where else ()
        found = PYTHON_OF_STEPS.cast(x[rows], grid, quantizer, *places)
        if codes is None:
            codes = found.new_empty(quantizer.codes_shape(x.shape))
        first = rows.start * codes.shape[0] // x.shape[0]  # two rows may share a byte
        codes[first : first + found.shape[0]] = found
    assert codes is not None, "a weight with elements has a slice"
    return codes


IN_SLICES = replace(PYTHON_OF_STEPS, amax=_amax, cast=_cast)
