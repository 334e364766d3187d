"""SwiGLU in FP8, an example of a package that builds on fp8compile by its public names."""

from swiglu8.ceil8 import Ceil8, inference_recipe
from swiglu8.debug import Seen, Watch, clear, observe, seen, watch
from swiglu8.int8 import Int8, int8_rowwise
from swiglu8.swiglu import quantized_swiglu, swiglu_linear, swiglu_quantize

__all__ = [
    "Ceil8",
    "Int8",
    "Seen",
    "Watch",
    "clear",
    "inference_recipe",
    "int8_rowwise",
    "observe",
    "quantized_swiglu",
    "seen",
    "swiglu_linear",
    "swiglu_quantize",
    "watch",
]
