"""The extension API for quantizers and operators of other packages, used by this package itself too.

    Quantizer       the base class of quantizers: write a frozen dataclass; subclassing registers it with torch.compile
    CurrentScaling  a quantizer with scale rules, to derive from
    register_op     makes an operator: schema, kernel, fake, derivative, decomposition, sharding, samples
    register_linear_like, register_experts
                    make convert take another library's linear layers or experts
    register_gemm   adds a GEMM for codes that no other GEMM reads; register_grouped_gemm adds one for experts
    register_statistic
                    adds a statistic that `fp8compile.Monitor` reads, computed from an Elements
    Observed        base class of your own modules, so that a monitor observes their GEMMs
    Split, Cut      describe how an op runs on shards
    rounded         in a decomposition: rounds a value to the dtype in which eager mode would have stored it
    quantizers      returns the quantizers and recipes of installed packages
    recipe          makes a recipe from one quantizer

``fp8compile.testing.check_quantizer`` and ``check_op`` test a quantizer or an op. See docs/extending.md.
"""

from __future__ import annotations

from fp8compile import recipes
from fp8compile.formats import E2M1, E4M3, E5M2, E8M0
from fp8compile.layout.quantized import Quantized
from fp8compile.nn.experts.host import Layout
from fp8compile.nn.experts.registration import register_experts, register_linear_like
from fp8compile.nn.observed_module import Observed
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.registration import register_gemm, register_grouped_gemm
from fp8compile.ops.layer.statistics.definitions import register_statistic
from fp8compile.ops.layer.statistics.elements import Elements
from fp8compile.ops.registry import OPS, Op, register_op
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.ops.sharding_rules import Cut, Sharding, Split, along_every_dim, grid_cuts
from fp8compile.quantizers import CurrentScaling, GemmConfig, Quantizer, Recipe, entry_points
from fp8compile.quantizers.blocks import as_matrix, block_amax, expand_blocks, grid_shape
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.scale_rules import exact_quotient
from fp8compile.recipes import of_quantizer as recipe

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


def quantizers() -> dict[str, Quantizer | Recipe]:
    """Load the quantizers and recipes of all installed packages; returns them by name.

    Packages declare them as entry points of the group ``fp8compile.quantizers``. ``fp8compile.recipes.by_name`` and
    ``fp8compile explain --recipe`` take the names.

    Raises:
        ImportError: An entry point can't be imported or called; the text names its distribution.
        TypeError: An entry point is neither a quantizer nor a recipe.
        ValueError: Two packages use one name for different things, or a package uses the name of a ready recipe.
    """
    return {name: entry_points.load(name) for name in recipes.installed()}
