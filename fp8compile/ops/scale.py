"""fp8compile::scale: from the amax of a block to its multiplier and its scale.

A function of a handful of numbers, but an op of its own, because it is where a sharded amax has to become one number
on all ranks, and where a third party's scale rule runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8compile.ops import samples
from fp8compile.ops.realize import realize
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding import Split, along_every_dim
from fp8compile.quantizers import Quantizer

__all__ = ["scale"]


def _kernel(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    multiplier = quantizer.multiplier(amax)
    return multiplier, quantizer.scale_of(multiplier)


def _fake(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax, dtype=quantizer.scale_dtype())


def _decompose(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    # realized: else each element of the cast would repeat the division of its block
    multiplier = realize(quantizer.multiplier(amax))
    return multiplier, quantizer.scale_of(multiplier)


def _sharding(amax: Tensor, quantizer: Quantizer) -> list[Split]:
    return along_every_dim(amax.ndim, inputs=1, outputs=2, others=1)


def _samples() -> Iterator[tuple]:
    special = torch.tensor([[0.0, 1e-45, 1e-39, 448.0], [3.4e38, torch.inf, torch.nan, 1.75]])
    for quantizer in samples.quantizers():
        yield special, quantizer
        yield special.t(), quantizer
        yield special[:0], quantizer


scale = register_op(
    "fp8compile::scale",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=_sharding,
    samples=_samples,
)
