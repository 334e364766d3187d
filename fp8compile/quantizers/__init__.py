"""Immutable quantizers, and the recipe that assigns them to the operands of a layer's GEMMs."""

from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.current_scaling import CurrentScaling
from fp8compile.quantizers.delayed_scaling import DelayedScaling
from fp8compile.quantizers.gemm_config import GemmConfig
from fp8compile.quantizers.lifetime_flags import accept_lifetime_flags, lifetime_of_flags, replace_lifetime_flags
from fp8compile.quantizers.quantizer import Quantizer, transposed, with_block
from fp8compile.quantizers.recipe import CALL, GEMMS, PARAMETER, PASS, STEP, TENSORS, Gemm, Recipe, gemm_kind
from fp8compile.quantizers.root_scaling import RootScaling
from fp8compile.quantizers.two_level_scaling import TwoLevelScaling

__all__ = [
    "CALL",
    "GEMMS",
    "PARAMETER",
    "PASS",
    "STEP",
    "TENSORS",
    "Constant",
    "CurrentScaling",
    "DelayedScaling",
    "Gemm",
    "GemmConfig",
    "Quantizer",
    "Recipe",
    "RootScaling",
    "TwoLevelScaling",
    "accept_lifetime_flags",
    "gemm_kind",
    "lifetime_of_flags",
    "replace_lifetime_flags",
    "transposed",
    "with_block",
]
