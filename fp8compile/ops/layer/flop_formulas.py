"""FLOP formulas of fp8compile's GEMM ops, for `torch.utils.flop_counter`: a converted model counts like the original.

PyTorch 2.11 to 2.15 have no formulas for their own grouped GEMMs and for ``_scaled_mm_v2``; this module adds them,
unless PyTorch has some. PyTorch's partitioner treats operators without a formula as free: with
`torch._functorch.config.activation_memory_budget` below 1 it would recompute the GEMMs of experts in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.gemms.grouped.grouped_blockwise_mm import grouped_blockwise_mm
from fp8compile.ops.gemms.grouped.grouped_mm import grouped_mm
from fp8compile.ops.gemms.grouped.grouped_nvfp4_mm import grouped_nvfp4_mm
from fp8compile.ops.gemms.grouped.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.gemms.scaled_mm import scaled_mm
from fp8compile.ops.layer.gemm_ops import LAYER_OPS
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_ops import TAIL
from fp8compile.ops.layer.operands import OUTPUT
from fp8compile.ops.nvfp4_mm import nvfp4_mm

__all__ = ["FLOP_FORMULAS", "FOUR_BIT_PRODUCTS"]

Shape = Sequence[int]


def _of_gradient(left: Shape, right: Shape, *args: Any, **__: Any) -> int:
    """Return the FLOPs of a layer's gradient: 2 * tokens * in_features * out_features on this rank."""
    layer = LayerArgs.of(*args[-TAIL:])
    return 2 * prod((*layer.sharding.tokens(left[:-1], layer.sizes, all_ranks=True), left[-1], right[-1]))


def _of_output(x: Shape, weight: Shape, *args: Any, **__: Any) -> int:
    layer = LayerArgs.of(*args[-TAIL:])
    out_features = layer.sharding.out_features(weight, layer.offs)
    return 2 * prod((*layer.sharding.tokens(x[:-1], layer.sizes, all_ranks=True), x[-1], out_features))


def _scaled_mm(a: Shape, b: Shape, *rest: Any, **__: Any) -> int:
    """Return the FLOPs of `scaled_mm`, from the shapes of values: packed codes have smaller shapes."""
    _, _, a_quantizer, b_quantizer, *_ = rest
    return 2 * prod(a_quantizer.values_shape(a)) * b_quantizer.values_shape(b)[1]


def _grouped(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped GEMM; rows without a group count too, because only the data say how many."""
    return 2 * prod(a) * b[-2] if len(b) == 3 else 2 * prod(a) * b[0]


def _in_pairs(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a GEMM, from the shapes of codes that are packed in pairs along the summed dim."""
    return 2 * _grouped(a, b)


def _grouped_in_high_precision(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(a) * b[-2 if len(b) == 3 else -1]


FOUR_BIT_PRODUCTS = (nvfp4_mm, grouped_nvfp4_mm)
FLOP_FORMULAS: dict[_compat.OpOverload, Callable[..., int]] = {
    **{op: _of_output if gemm is OUTPUT else _of_gradient for op, gemm in LAYER_OPS.items()},
    scaled_mm: _scaled_mm,
    **dict.fromkeys((scaled_grouped_mm, grouped_blockwise_mm), _grouped),
    **dict.fromkeys(FOUR_BIT_PRODUCTS, _in_pairs),
    grouped_mm: _grouped_in_high_precision,
}


def _by_pytorch(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a GEMM of PyTorch; with groups, each operand may be stacked, such as (g, k, n)."""
    rows = a.shape[-2] if b.ndim == 2 else a.shape[:-1].numel()
    packed = 2 if a.dtype is torch.float4_e2m1fn_x2 else 1  # codes a byte, along k
    return 2 * rows * packed * a.shape[-1] * b.shape[-1]


# Operators of PyTorch's that it multiplies by, and counts as nothing.
UNCOUNTED = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2")


def _register() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for op, formula in FLOP_FORMULAS.items():
        register_flop_formula(op.overloadpacket)(formula)
    for name in UNCOUNTED:
        product = getattr(torch.ops.aten, name, None)
        if product is not None and product not in flop_registry:
            register_flop_formula(product, get_raw=True)(_by_pytorch)


# importing torch.utils.flop_counter costs 0.15 s, which `import fp8compile` must not pay
_compat.when_imported("torch.utils.flop_counter", _register)
