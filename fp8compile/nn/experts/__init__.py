"""Modules of other libraries that convert knows: experts, and linear layers that are not a ``nn.Linear``."""

from fp8compile.nn.experts.converted_class import (
    ConvertedExperts,
    ConvertedLinearLike,
    ConvertedModule,
    become_float8_hosted,
    become_plain_hosted,
    cannot_convert_hosted,
    cannot_revert_hosted,
    cannot_take_hosted,
    hosted_class,
)
from fp8compile.nn.experts.host import stacks
from fp8compile.nn.experts.known_modules import (
    as_it_lies,
    holds_no_stacks,
    is_experts,
    is_hosted,
    is_transposed,
    layout_of,
    method_that_multiplies,
    num_experts,
)
from fp8compile.nn.experts.registration import register_experts, register_linear_like
from fp8compile.nn.experts.routers import routers

__all__ = [
    "as_it_lies",
    "ConvertedExperts",
    "ConvertedLinearLike",
    "ConvertedModule",
    "become_float8_hosted",
    "become_plain_hosted",
    "cannot_convert_hosted",
    "cannot_revert_hosted",
    "cannot_take_hosted",
    "holds_no_stacks",
    "hosted_class",
    "is_experts",
    "is_hosted",
    "is_transposed",
    "layout_of",
    "method_that_multiplies",
    "num_experts",
    "register_experts",
    "register_linear_like",
    "routers",
    "stacks",
]
