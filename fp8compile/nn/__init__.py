"""The FP8 linear layer, and the functions that convert a model's layers to FP8."""

from fp8compile.nn.calibrate import calibrate
from fp8compile.nn.convert import convert, revert
from fp8compile.nn.delayed_states import reset_delayed_scaling
from fp8compile.nn.freeze_weights import freeze_weights
from fp8compile.nn.functional import linear
from fp8compile.nn.grouped import grouped_linear, grouped_mm
from fp8compile.nn.kept_codes import renew_weight_codes
from fp8compile.nn.linear import Linear
from fp8compile.nn.master_weights import MasterWeights
from fp8compile.nn.monitor import Monitor
from fp8compile.nn.observed import Observed
from fp8compile.nn.regions import compile, repeated_blocks
from fp8compile.nn.report import ConversionReport, ConversionRow, conversion_report
from fp8compile.nn.set_recipe import set_recipe
from fp8compile.nn.state import DelayedState

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
