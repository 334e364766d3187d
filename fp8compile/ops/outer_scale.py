"""The ops for two levels of scales: fp8compile::outer_amax and fp8compile::two_scales.

The amax of the whole tensor has its own op, because ranks that share a tensor reduce the amax before computing scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops import quantization_steps
from fp8compile.ops.inductor_hints import realize
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import dtype_said

__all__ = ["outer_amax", "two_scales"]

# ---------------------------------------------------------------------------------- outer_amax


outer_amax: OpOverload = register_op(
    "fp8compile::outer_amax",
    quantization_steps.outer_amax,
    fake=lambda amax, quantizer: amax.new_empty(quantization_steps.ONE),
    backward=None,
    decompose=lambda amax, quantizer: quantizer.outer_amax(amax),
    sharding=lambda amax, quantizer: [Split((Cut(dim), None), ("max",)) for dim in range(amax.ndim)],
)

# ---------------------------------------------------------------------------------- two_scales


def _scales_fake(amax: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    dtype = dtype_said(quantizer)
    return torch.empty_like(amax), torch.empty_like(amax, dtype=dtype), torch.empty_like(outer_amax)


def _scales_decompose(amax: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    outer = realize(quantization_steps.outer_scale(outer_amax, quantizer))
    scale = quantization_steps.block_scale(amax, outer_amax, quantizer)
    # `realize`, as in fp8compile::scale: otherwise each element of the cast would repeat the division of its block
    return realize(quantization_steps.block_multiplier(scale, outer, quantizer)), scale, outer


two_scales: OpOverload = register_op(
    "fp8compile::two_scales",
    quantization_steps.two_scales,
    fake=_scales_fake,
    backward=None,
    decompose=_scales_decompose,
    sharding=lambda amax, outer_amax, quantizer: [
        Split((Cut(dim), None, None), (dim, dim, None)) for dim in range(amax.ndim)
    ],
)
