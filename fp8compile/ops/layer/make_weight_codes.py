"""fp8compile::weight_codes: quantize a weight once to the codes that a GEMM reads, for several calls of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.layout.four_bit_packing import packed_dim, with_a_code_a_byte
from fp8compile.layout.quantized import STACK, WHOLE, Plain, Quantized
from fp8compile.layout.shapes import codes_shape, scale_shapes
from fp8compile.ops.layer.operands import WEIGHT_ROLES, Operands, Phase, as_summed, packed_along
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Quantizer, Recipe

__all__ = ["Sets", "quantizer_of_codes", "sets_of_weight", "weight_codes"]

Sets = tuple[Quantized, Quantized]  # what the output reads, and what grad_input reads; they may be the same


def _set(weight: Tensor, role: str, recipe: Recipe, phase: Phase) -> Quantized:
    is_stack = weight.ndim == 3
    operands = Operands(with_a_code_a_byte(recipe) if is_stack else recipe, phase)
    return operands.of(Plain(weight, STACK if is_stack else WHOLE), role)


def sets_of_weight(weight: Tensor, recipe: Recipe) -> Sets:
    """Quantize a weight, (N, K) or (E, N, K); returns the codes for the output and the codes for grad_input.

    The codes equal those that a layer makes from the weight. If both GEMMs read the same codes, both are one object.
    """
    first = _set(weight, WEIGHT_ROLES[0], recipe, Phase.EAGER)
    # on a GPU, each product of experts has its four-bit codes packed along the dim that it sums
    if recipe.shares_weight_codes() and not (weight.ndim == 3 and packed_dim(first.quantizer) is not None):
        return first, first
    return first, _set(weight, WEIGHT_ROLES[1], recipe, Phase.EAGER)


# ---------------------------------------------------------------------------------- the op that makes a set again


def _parts(weight: Tensor, role: str, recipe: Recipe, phase: Phase) -> tuple[Tensor, Tensor, Tensor]:
    found = _set(weight, role, recipe, phase)
    outer = weight.new_empty(0, dtype=torch.float32) if found.outer_scale is None else found.outer_scale
    return found.codes.contiguous(), found.scale.contiguous(), outer


def _kernel(weight: Tensor, role: str, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    return _parts(weight, role, recipe, Phase.EAGER)


def _decompose(weight: Tensor, role: str, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    return _parts(weight, role, recipe, Phase.INFERENCE)


def _quantizer(weight: Tensor, role: str, recipe: Recipe) -> Quantizer:
    """Return the quantizer of a weight's codes, including how the codes are packed."""
    found: Any = (with_a_code_a_byte(recipe) if weight.ndim == 3 else recipe).quantizer_read(role)
    if weight.ndim == 2:
        return found.for_shape(weight.shape)
    if found.has_outer_scale():
        return as_summed(Plain(weight, STACK), found, role).for_shape(weight.shape[1:])
    return found.unpacked() or found


def quantizer_of_codes(codes: Tensor, weight: Tensor, role: str, recipe: Recipe) -> Quantizer:
    """Return the quantizer that made ``codes``, those of a weight for the recipe's field ``role``."""
    found: Any = recipe.quantizer_read(role)
    if weight.ndim == 3 and found.has_outer_scale():  # where they were made decides whether they are packed
        return found.unpacked() if codes.shape == weight.shape else replace(found, packed=packed_along(role))
    return _quantizer(weight, role, recipe)


def _fake(weight: Tensor, role: str, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    quantizer = _quantizer(weight, role, recipe)
    blocks, *outer = scale_shapes(weight.shape, quantizer)
    return (
        weight.new_empty(codes_shape(weight.shape, quantizer), dtype=torch.uint8),
        weight.new_empty(blocks, dtype=quantizer.scale_dtype()),
        weight.new_empty(outer[0] if outer else 0, dtype=torch.float32),
    )


weight_codes: OpOverload = register_op(
    "fp8compile::weight_codes",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_decompose,
    sharding=None,  # codes that live for a step are those of whole weights
)
