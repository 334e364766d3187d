"""fp8compile::noted_codes and noted_counts: marks in a graph that tell which tensor was cast or counted.

    x --amax, scale, cast--> codes, scale --noted_codes(codes, scale, x, quantizer)--> product
    x, codes, scale --> pieces --noted_counts(pieces, x, quantizer, halves)--> totals of a monitor

`fp8compile.ops.fuse_noted` uses the marks to let one kernel compute and quantize several tensors, and removes them
before PyTorch cuts the graph into forward and backward. A mark that runs in eager mode copies codes, scale or pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import inductor
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.registry import register_op
from fp8compile.ops.scale import scale
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = ["noted_codes", "noted_counts"]


def _codes(codes: Tensor, scale: Tensor, x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return codes.clone(), scale.clone()


def _samples_of_codes() -> Iterator[tuple[Any, ...]]:
    quantizer = CurrentScaling(block=(1, 16))
    for x in (torch.randn(32, 48), torch.randn(16, 40).bfloat16(), torch.empty(0, 32)):
        multiplier, found = scale(amax(x, quantizer), quantizer)
        codes = cast(x, multiplier, quantizer)
        yield codes, found, x, quantizer
        yield codes.t().contiguous().t(), found.t(), x, quantizer


noted_codes: OpOverload = register_op(
    "fp8compile::noted_codes",
    _codes,
    fake=lambda codes, scale, x, quantizer: (torch.empty_like(codes), torch.empty_like(scale)),
    backward=None,
    decompose=None,
    portable=_codes,
    sharding=None,
    samples=_samples_of_codes,
)
"""Return codes and scale unchanged, and mark in the graph that ``quantizer`` made them of ``x``.

If ``x`` is behind a barrier (`made_of_kept`), it is computed from what the graph keeps, and nothing else reads it.
"""
inductor.register_lowering(noted_codes, lambda codes, scale, x, quantizer: (codes, scale))


def _counts(pieces: Tensor, x: Tensor, quantizer: Quantizer, halves: bool) -> Tensor:
    return pieces.clone()


def _samples_of_counts() -> Iterator[tuple[Any, ...]]:
    quantizer = CurrentScaling(block=(1, 16))
    for rows in (6, 0):
        x = torch.randn(16, rows).t()
        yield torch.arange(rows).view(1, rows), x, quantizer, True
        yield x.amax(-1).view(2, rows // 2).t(), x, quantizer, False


noted_counts: OpOverload = register_op(
    "fp8compile::noted_counts",
    _counts,
    fake=lambda pieces, x, quantizer, halves: torch.empty_like(pieces),
    backward=None,
    decompose=None,
    portable=_counts,
    sharding=None,
    samples=_samples_of_counts,
)
"""Return pieces unchanged, and mark in the graph that they are counts of the cast of ``x`` by ``quantizer``.

With ``halves``, pieces are underflows and saturations in the form of `fp8compile.ops.count_cast`; else largest
magnitudes.
"""
inductor.register_lowering(noted_counts, lambda pieces, x, quantizer, halves: pieces)
