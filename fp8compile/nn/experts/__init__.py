"""Modules of experts, as other libraries write them: which ones there are, and their classes in FP8."""

from fp8compile.nn.experts.classes import (
    ConvertedExperts,
    become_float8_experts,
    become_plain_experts,
    cannot_convert_experts,
    cannot_revert_experts,
    cannot_take_experts,
    experts_class,
)
from fp8compile.nn.experts.hosts import (
    is_experts,
    is_transposed,
    matrices_of_experts,
    method_of_experts,
    num_experts,
    stacks,
)
from fp8compile.nn.experts.routers import routers

__all__ = [
    "ConvertedExperts",
    "become_float8_experts",
    "become_plain_experts",
    "cannot_convert_experts",
    "cannot_revert_experts",
    "cannot_take_experts",
    "experts_class",
    "is_experts",
    "is_transposed",
    "matrices_of_experts",
    "method_of_experts",
    "num_experts",
    "routers",
    "stacks",
]
