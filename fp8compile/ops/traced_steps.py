"""One op for each step of quantization, such as amax or cast, for traced code: each step is a node of the graph."""

from __future__ import annotations

from fp8compile._compat import once_a_graph
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.outer_scale import outer_amax, two_scales
from fp8compile.ops.quantization_steps import Steps
from fp8compile.ops.scale import scale

__all__ = ["OPS_OF_STEPS"]

# forward and backward share calls, so the backward reads the forward's amaxes and does not compute them again
OPS_OF_STEPS = Steps(*map(once_a_graph, (amax, scale, cast, outer_amax, two_scales)))
