"""fp8compile::cast: multiply values by their block's multiplier (1 / scale), and round to codes.

fp8compile::cast_again computes the same codes in the backward. Compilers merge equal calls of one op, which would keep
the forward's codes, one byte per element, until the backward; a call of a different op is computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops import quantization_steps, samples
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Split, grid_cuts
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import shape_said

__all__ = ["cast", "cast_again", "empty_codes"]


def empty_codes(x: Tensor, quantizer: Quantizer, columns: int | None = None) -> Tensor:
    """Make an uninitialized uint8 tensor for the codes of ``x``.

    With ``columns``, the codes of a matrix (R, K) are transposed, and R is padded to ``columns``: (K, columns).
    """
    shape = shape_said(quantizer, "codes_shape", x.shape if columns is None else (columns, x.shape[1]))
    return x.new_empty(shape if columns is None else shape[::-1], dtype=torch.uint8)


def _fake(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Tensor | None) -> Tensor:
    return empty_codes(x, quantizer)


def _sharding(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Tensor | None) -> list[Split]:
    packs = shape_said(quantizer, "codes_shape", x.shape) != tuple(x.shape)
    if packs or not quantizer.is_local():
        return []
    whole = (None,) * (1 + len(where))
    return [Split((cut, grid, *whole), (cut.dim,)) for cut, grid in grid_cuts(x.shape, quantizer.block)]


def _samples() -> Iterator[tuple[Any, ...]]:
    for x in samples.matrices():
        for quantizer in samples.quantizers():
            yield x, quantizer.multiplier(quantizer.amax(x)), quantizer, None, None
            if x.ndim == 2 and not quantizer.is_local():  # a part that begins at row 3, column 5 of 100
                rows, columns = (torch.arange(size) for size in x.shape)
                yield x, quantizer.multiplier(quantizer.amax(x)), quantizer, (rows + 3) * 100, columns + 5


def _register(name: str, *, apart: bool) -> OpOverload:
    return register_op(
        name,
        quantization_steps.cast,
        fake=_fake,
        backward=None,
        decompose=lambda x, *others: quantization_steps.cast(rounded(x, apart=apart), *others),
        sharding=_sharding,
        samples=_samples,
    )


cast: OpOverload = _register("fp8compile::cast", apart=False)
cast_again: OpOverload = _register("fp8compile::cast_again", apart=True)
