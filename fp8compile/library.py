"""The extension API for quantizers and operators of other packages. fp8compile itself uses it too.

    Quantizer       base class of quantizers: write a frozen dataclass; subclassing registers it with torch.compile
    CurrentScaling  quantizer with scale rules, to subclass
    register_op     creates an operator: schema, kernel, fake, derivative, decomposition, sharding, samples
    register_linear_like, register_experts
                    add support for another library's linear layers or experts to convert
    register_gemm   adds a GEMM for a new quantized format; register_grouped_gemm adds one for experts
    register_statistic
                    adds a statistic to `fp8compile.Monitor`, computed from an Elements
    Observed        base class of your own modules, so that a monitor observes their GEMMs
    Split, Cut      describe how an op runs on shards
    rounded         in a decomposition: rounds a value to the dtype in which eager mode would have stored it
    quantizers      returns the quantizers and recipes of installed packages
    recipe          creates a recipe from one quantizer

``fp8compile.testing.check_quantizer`` and ``check_op`` test a quantizer or an op. See docs/extending.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp8compile import recipes
from fp8compile.formats import E2M1, E4M3, E5M2, E8M0
from fp8compile.layout.quantized import Quantized
from fp8compile.nn.experts.module_spec import Layout
from fp8compile.nn.experts.registration import register_experts, register_linear_like
from fp8compile.nn.layer.observed_module import Observed
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.registration.register_gemm import register_gemm, register_grouped_gemm
from fp8compile.ops.registry import OPS, Op, register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Cut, Sharding, Split, along_every_dim, grid_cuts
from fp8compile.quantizers import CurrentScaling, GemmConfig, Quantizer, Recipe, entry_points
from fp8compile.quantizers.blocks import as_matrix, block_amax, expand_blocks, grid_shape
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.scale_rules import exact_quotient
from fp8compile.recipes import of_quantizer as recipe

if TYPE_CHECKING:
    from fp8compile.monitor.definitions import register_statistic
    from fp8compile.monitor.elements import Elements

Operand = GroupedOperand = Quantized  # one side of a product, of matrices or of groups

__all__ = [
    "Constant",
    "Quantizer",
    "CurrentScaling",
    "Recipe",
    "recipe",
    "quantizers",
    "register_op",
    "register_gemm",
    "register_grouped_gemm",
    "register_linear_like",
    "register_experts",
    "register_statistic",
    "Elements",
    "Observed",
    "Layout",
    "GemmKernel",
    "GemmProblem",
    "GemmConfig",
    "Operand",
    "GroupedGemm",
    "GroupedOperand",
    "Op",
    "OPS",
    "Sharding",
    "Split",
    "Cut",
    "along_every_dim",
    "grid_cuts",
    "rounded",
    "exact_quotient",
    "as_matrix",
    "block_amax",
    "expand_blocks",
    "grid_shape",
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
]


# names from rooms that the core does not import, each with its module
LAZY = {"register_statistic": "fp8compile.monitor.definitions", "Elements": "fp8compile.monitor.elements"}


def __getattr__(name: str) -> Any:
    """Import and return a name of `LAZY`."""
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def quantizers() -> dict[str, Quantizer | Recipe]:
    """Load the quantizers and recipes of all installed packages, and return them by name.

    Packages declare them as entry points in the group ``fp8compile.quantizers``. The names work in
    ``fp8compile.recipes.by_name`` and ``fp8compile explain --recipe``.

    Raises:
        ImportError: An entry point can't be imported or called; the message names its distribution.
        TypeError: An entry point is neither a quantizer nor a recipe.
        ValueError: Two packages use the same name, or a package uses the name of a built-in recipe.
    """
    return {name: entry_points.load(name) for name in recipes.installed()}
