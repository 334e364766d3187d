"""fp8compile::dequantize: codes times scales in float32, rounded once to ``dtype``.

With two levels of scales, the outer scale is a further factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Split, grid_cuts
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import returned, shape_said

__all__ = ["dequantize"]


def _kernel(
    codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, outer_scale: Tensor | None = None
) -> Tensor:
    found, shape = quantizer.dequantize(codes, scale), shape_said(quantizer, "values_shape", codes.shape)
    values = returned(found, quantizer, "dequantize", shape, torch.float32, "what values_shape says")
    values = values if outer_scale is None else values * outer_scale
    return values.to(dtype).contiguous()


def _fake(codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, *outer: Tensor | None) -> Tensor:
    return codes.new_empty(shape_said(quantizer, "values_shape", codes.shape), dtype=dtype)


def _sharding(
    codes: Tensor, scale: Tensor, quantizer: Quantizer, dtype: torch.dtype, *outer_scale: Tensor | None
) -> list[Split]:
    if shape_said(quantizer, "values_shape", codes.shape) != tuple(codes.shape):
        return []  # unknown where bytes with several codes may be cut
    whole = (None,) * (2 + len(outer_scale))
    return [Split((cut, grid, *whole), (cut.dim,)) for cut, grid in grid_cuts(codes.shape, quantizer.block)]


dequantize: OpOverload = register_op(
    "fp8compile::dequantize",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=lambda *args: rounded(_kernel(*args)).to(args[3]),
    sharding=_sharding,
)
