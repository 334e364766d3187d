"""How many floating-point operations our products are, for `torch.utils.flop_counter`.

With them `FlopCounterMode`, and what measures utilization by it, counts a converted model as it counts the unconverted
one. Quantizing is no product and counts nothing, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from fp8compile import _compat
from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.grouped_nvfp4_mm import grouped_nvfp4_mm
from fp8compile.ops.groups.scaled_grouped_mm import scaled_grouped_mm
from fp8compile.ops.layer.fsdp_delayed import fsdp_delayed_linear
from fp8compile.ops.layer.fsdp_linear import fsdp_linear
from fp8compile.ops.layer.layer_ops import LAYER_OPS
from fp8compile.ops.layer.linear import GRAD_INPUT, GRAD_WEIGHT, OUTPUT
from fp8compile.ops.layer.sharded_linear import sharded_grad_input, sharded_grad_weight, sharded_linear
from fp8compile.ops.nvfp4_mm import nvfp4_mm
from fp8compile.ops.scaled_mm import scaled_mm

__all__ = ["FLOP_FORMULAS", "FOUR_BIT_PRODUCTS"]

Shape = Sequence[int]


def _linear(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * weight[-2]


def _grad_input(grad_output: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(grad_output) * weight[-1]


def _grad_weight(grad_output: Shape, x: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(grad_output) * x[-1]


def _scaled_mm(a: Shape, b: Shape, *rest: Any, **__: Any) -> int:
    """The product of what codes stand for, of which two may share a byte."""
    _, _, a_quantizer, b_quantizer, *_ = rest
    return 2 * prod(a_quantizer.values_shape(a)) * b_quantizer.values_shape(b)[1]


def _grouped(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """The product of every row: how many belong to no group is data."""
    return 2 * prod(a) * b[-2] if len(b) == 3 else 2 * prod(a) * b[0]


def _in_pairs(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """The product of two matrices, or of groups, with two codes in a byte along what is summed over."""
    return 2 * _grouped(a, b)


def _grouped_in_high_precision(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(a) * b[-2 if len(b) == 3 else -1]


def _of_all_tokens(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula for a rank that gets the tokens of the others before it multiplies."""

    def of_all(first: Shape, second: Shape, *where: Any, **__: Any) -> int:
        sequence_dim, sequence_sizes = where[-5:-3]
        shape = list(first)
        if sequence_dim is not None:
            shape[sequence_dim] = sum(sequence_sizes)
        return formula(shape, second)

    return of_all


def _of_whole_weight(x: Shape, shard: Shape, *where: Any, **__: Any) -> int:
    """Floating-point operations of a rank that has some rows of the weight and gathers the others."""
    rows = where[-2]
    return 2 * prod(x) * sum(rows.sizes)


FOUR_BIT_PRODUCTS = (nvfp4_mm, grouped_nvfp4_mm)
SHARDED = (sharded_linear, sharded_grad_input, sharded_grad_weight)
OF_GEMM = {OUTPUT: _linear, GRAD_INPUT: _grad_input, GRAD_WEIGHT: _grad_weight}
FLOP_FORMULAS: dict[torch._ops.OpOverload, Callable[..., int]] = {
    **{op: _of_all_tokens(OF_GEMM[gemm]) if op in SHARDED else OF_GEMM[gemm] for op, gemm in LAYER_OPS.items()},
    **dict.fromkeys((fsdp_linear, fsdp_delayed_linear), _of_whole_weight),
    scaled_mm: _scaled_mm,
    scaled_grouped_mm: _grouped,
    **dict.fromkeys(FOUR_BIT_PRODUCTS, _in_pairs),
    grouped_mm: _grouped_in_high_precision,
}


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op, formula in FLOP_FORMULAS.items():
        register_flop_formula(op.overloadpacket)(formula)


# importing it costs 0.15 s, which `import fp8compile` must not pay
_compat.when_imported("torch.utils.flop_counter", _register)
