"""fp8compile::scale: computes the multiplier (1 / scale) and the scale of each block from its amax.

The op is separate, because ranks that share a block must agree on the block's amax before this step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile.ops import samples
from fp8compile.ops.inductor_hints import realize
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import along_every_dim
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import dtype_said, is_own, returned

__all__ = ["scale"]


def _multiplier(amax: Tensor, quantizer: Quantizer) -> Tensor:
    found = quantizer.multiplier(amax)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found
    return returned(found, quantizer, "multiplier", amax.shape, torch.float32, "that of amax")


def _scale(multiplier: Tensor, quantizer: Quantizer) -> Tensor:
    found = quantizer.scale_of(multiplier)
    if is_own(type(quantizer)):  # type: ignore[arg-type]  # classes are hashable
        return found
    what = "that of multiplier, in scale_dtype()"
    return returned(found, quantizer, "scale_of", multiplier.shape, dtype_said(quantizer), what)


def _kernel(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    multiplier = _multiplier(amax, quantizer)
    return multiplier, _scale(multiplier, quantizer)


def _fake(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax, dtype=dtype_said(quantizer))


def _decompose(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    # `realize`: otherwise each element of the cast would repeat the division of its block
    multiplier = realize(_multiplier(amax, quantizer))
    return multiplier, _scale(multiplier, quantizer)


def _samples() -> Iterator[tuple[Any, ...]]:
    special = torch.tensor([[0.0, 1e-45, 1e-39, 448.0], [3.4e38, torch.inf, torch.nan, 1.75]])
    for quantizer in samples.quantizers():
        yield special, quantizer
        yield special.t(), quantizer
        yield special[:0], quantizer


scale: OpOverload = register_op(
    "fp8compile::scale",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=lambda amax, quantizer: along_every_dim(amax.ndim, inputs=1, outputs=2, others=1),
    samples=_samples,
)
