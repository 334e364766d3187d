"""The FP8 linear layer, and the functions that convert a model's layers to FP8."""

from fp8compile.nn.compile_regions import compile, repeated_blocks
from fp8compile.nn.convert.calibrate import calibrate
from fp8compile.nn.convert.convert import convert, revert
from fp8compile.nn.convert.reset_delayed_scaling import reset_delayed_scaling
from fp8compile.nn.convert.set_recipe import set_recipe
from fp8compile.nn.layer.cached_weights import invalidate_weight_cache
from fp8compile.nn.layer.delayed_state import DelayedState
from fp8compile.nn.layer.functional import linear
from fp8compile.nn.layer.grouped_linear import grouped_linear, grouped_mm
from fp8compile.nn.layer.linear import Linear
from fp8compile.nn.layer.observed_module import Observed
from fp8compile.nn.report.conversion_report import ConversionReport, ConversionRow, conversion_report
from fp8compile.nn.weights.freeze_weights import freeze_weights

__all__ = [
    "ConversionReport",
    "ConversionRow",
    "DelayedState",
    "Linear",
    "calibrate",
    "Observed",
    "compile",
    "conversion_report",
    "convert",
    "freeze_weights",
    "grouped_linear",
    "grouped_mm",
    "linear",
    "invalidate_weight_cache",
    "repeated_blocks",
    "reset_delayed_scaling",
    "revert",
    "set_recipe",
]
