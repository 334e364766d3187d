"""The FP8 linear layer, and the functions that convert a model's layers to FP8."""

from fp8compile.nn.cached_weights import renew_weight_codes
from fp8compile.nn.calibrate import calibrate
from fp8compile.nn.compile_regions import compile, repeated_blocks
from fp8compile.nn.conversion_report import ConversionReport, ConversionRow, conversion_report
from fp8compile.nn.convert import convert, revert
from fp8compile.nn.delayed_state import DelayedState
from fp8compile.nn.freeze_weights import freeze_weights
from fp8compile.nn.functional import linear
from fp8compile.nn.grouped_linear import grouped_linear, grouped_mm
from fp8compile.nn.linear import Linear
from fp8compile.nn.master_weights import MasterWeights
from fp8compile.nn.monitor import Monitor
from fp8compile.nn.observed_module import Observed
from fp8compile.nn.reset_delayed_scaling import reset_delayed_scaling
from fp8compile.nn.set_recipe import set_recipe

__all__ = [
    "ConversionReport",
    "ConversionRow",
    "DelayedState",
    "Linear",
    "MasterWeights",
    "calibrate",
    "Monitor",
    "Observed",
    "compile",
    "conversion_report",
    "convert",
    "freeze_weights",
    "grouped_linear",
    "grouped_mm",
    "linear",
    "renew_weight_codes",
    "repeated_blocks",
    "reset_delayed_scaling",
    "revert",
    "set_recipe",
]
