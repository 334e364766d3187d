"""Immutable quantizers, and the recipe that says which operand gets which."""

from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.current_scaling import CurrentScaling
from fp8compile.quantizers.quantizer import Quantizer
from fp8compile.quantizers.recipe import GEMMS, Gemm, Recipe, gemm_kind

__all__ = ["GEMMS", "Constant", "CurrentScaling", "Gemm", "Quantizer", "Recipe", "gemm_kind"]
