"""The three steps that quantize a tensor, amax, scale and cast: as ops, or as the Python functions behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.registry import OPS
from fp8compile.ops.scale import scale
from fp8compile.quantizers import Quantizer

__all__ = ["OPS_OF_STEPS", "PYTHON_OF_STEPS", "Steps"]


@dataclass(frozen=True)
class Steps:
    """The three steps that quantize a tensor: the ops, or their Python implementations.

    Below the dispatcher no mode sees an op, and each dispatch costs 10 us: eager kernels take the implementations.
    """

    amax: Callable[[Tensor, Quantizer], Tensor]
    scale: Callable[[Tensor, Quantizer], tuple[Tensor, Tensor]]
    cast: Callable[[Tensor, Tensor, Quantizer], Tensor]


OPS_OF_STEPS = Steps(amax, scale, cast)
PYTHON_OF_STEPS = Steps(*(OPS[op.name()].impl for op in (amax, scale, cast)))
