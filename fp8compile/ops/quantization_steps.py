"""The steps that quantize a tensor, as ops or as the Python functions that implement the ops.

With one level of scales the steps are amax, scale and cast; with two levels, amax, outer_amax, two_scales and cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fp8compile.inductor import once_a_graph
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.outer_scale import outer_amax, two_scales
from fp8compile.ops.registry import OPS
from fp8compile.ops.scale import scale
from fp8compile.quantizers import Quantizer

__all__ = ["OPS_OF_STEPS", "PYTHON_OF_STEPS", "Steps"]


@dataclass(frozen=True)
class Steps:
    """The functions that quantize a tensor step by step: the ops, or the Python functions behind the ops.

    Eager kernels call the Python functions, because the dispatch of an op costs 10 us.
    """

    amax: Callable[[Tensor, Quantizer], Tensor]
    scale: Callable[[Tensor, Quantizer], tuple[Tensor, Tensor]]
    cast: Callable[..., Tensor]  # (x, multiplier, quantizer); for a part also positions of its rows and columns
    outer_amax: Callable[[Tensor, Quantizer], Tensor]
    two_scales: Callable[[Tensor, Tensor, Quantizer], tuple[Tensor, Tensor, Tensor]]


# forward and backward share calls, so the backward reads the forward's amaxes and does not compute them again
OPS_OF_STEPS = Steps(*map(once_a_graph, (amax, scale, cast, outer_amax, two_scales)))
PYTHON_OF_STEPS = Steps(*(OPS[op.name()].impl for op in (amax, scale, cast, outer_amax, two_scales)))
