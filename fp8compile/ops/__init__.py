"""The operators `torch.ops.fp8compile.*`, which appear as nodes in traced graphs."""

from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.cast_transpose import cast_transpose
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.exchange.dispatch import combine, dispatch
from fp8compile.ops.exchange.exchange_rows import exchange_rows
from fp8compile.ops.gemms.grouped.grouped_blockwise_mm import grouped_blockwise_mm
from fp8compile.ops.gemms.grouped.grouped_mm import grouped_mm
from fp8compile.ops.gemms.grouped.grouped_nvfp4_mm import grouped_nvfp4_mm
from fp8compile.ops.gemms.grouped.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.gemms.scaled_mm import scaled_mm
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.group_cast import group_cast
from fp8compile.ops.groups.group_cast_transpose import group_cast_transpose
from fp8compile.ops.groups.group_outer_amaxes import group_outer_amaxes
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.group_quantize_rows import group_quantize_rows
from fp8compile.ops.groups.group_quantize_two_levels import group_quantize_two_levels
from fp8compile.ops.inductor_hints import realize, snapshot
from fp8compile.ops.layer.delayed_linear import delayed_linear
from fp8compile.ops.layer.flop_formulas import FLOP_FORMULAS, FOUR_BIT_PRODUCTS
from fp8compile.ops.layer.fsdp_amax import fsdp_amax
from fp8compile.ops.layer.fsdp_delayed_amaxes import fsdp_amax_carriers, fsdp_amaxes_together
from fp8compile.ops.layer.fsdp_gather_high_precision import fsdp_gather
from fp8compile.ops.layer.gemm_ops import GEMM_OPS, LAYER_OPS
from fp8compile.ops.layer.layer_ops import grad_input, grad_weight, linear
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.ops.layer.make_weight_codes import weight_codes
from fp8compile.ops.nvfp4_mm import nvfp4_mm
from fp8compile.ops.outer_amaxes import outer_amaxes
from fp8compile.ops.outer_scale import outer_amax, two_scales
from fp8compile.ops.quantize_two_levels import quantize_two_levels
from fp8compile.ops.quantize_weight import quantize_weight
from fp8compile.ops.registry import OPS, decompositions
from fp8compile.ops.scale import scale
from fp8compile.ops.scatter_sum import scatter_sum
from fp8compile.ops.straight_through import straight_through

__all__ = [
    "FLOP_FORMULAS",
    "FOUR_BIT_PRODUCTS",
    "GEMM_OPS",
    "LAYER_OPS",
    "UNSHARDED",
    "OPS",
    "amax",
    "cast",
    "combine",
    "decompositions",
    "delayed_linear",
    "dequantize",
    "dispatch",
    "exchange_rows",
    "fsdp_amax",
    "fsdp_amaxes_together",
    "fsdp_gather",
    "fsdp_amax_carriers",
    "grad_input",
    "grad_weight",
    "group_amax",
    "group_cast",
    "group_outer_amaxes",
    "group_quantize",
    "group_cast_transpose",
    "group_quantize_rows",
    "group_quantize_two_levels",
    "grouped_blockwise_mm",
    "grouped_mm",
    "grouped_nvfp4_mm",
    "linear",
    "nvfp4_mm",
    "outer_amax",
    "outer_amaxes",
    "cast_transpose",
    "quantize_two_levels",
    "quantize_weight",
    "realize",
    "scale",
    "scaled_grouped_mm",
    "scaled_mm",
    "scatter_sum",
    "snapshot",
    "straight_through",
    "two_scales",
    "weight_codes",
]
