"""fp8compile::scale: computes the multiplier (1 / scale) and the scale of each block from its amax.

The op is separate, because ranks that share a block must agree on the block's amax before this step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops import quantization_steps
from fp8compile.ops.inductor_hints import realize
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import along_every_dim
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import dtype_said

__all__ = ["scale"]


def _fake(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax, dtype=dtype_said(quantizer))


def _decompose(amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    # `realize`: otherwise each element of the cast would repeat the division of its block
    multiplier = realize(quantization_steps.multiplier(amax, quantizer))
    return multiplier, quantization_steps.scale_of(multiplier, quantizer)


scale: OpOverload = register_op(
    "fp8compile::scale",
    quantization_steps.scale,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=lambda amax, quantizer: along_every_dim(amax.ndim, inputs=1, outputs=2, others=1),
)
