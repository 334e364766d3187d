"""The operators, `torch.ops.fp8compile.*`: what stands in graphs."""

from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.linear import grad_input, grad_weight, linear
from fp8compile.ops.realize import realize
from fp8compile.ops.registry import OPS, Op, register_op
from fp8compile.ops.scale import scale
from fp8compile.ops.scaled_mm import scaled_mm

__all__ = [
    "OPS",
    "Op",
    "amax",
    "cast",
    "dequantize",
    "grad_input",
    "grad_weight",
    "linear",
    "realize",
    "register_op",
    "scale",
    "scaled_mm",
]
