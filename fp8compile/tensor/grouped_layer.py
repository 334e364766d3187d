"""A stack of quantized matrices as the weight of a grouped layer: their own codes are the operand, in both directions.

It is what FSDP2 gathered, or a parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8compile import _compat, ops
from fp8compile.ops.gemms.grouped.kernel import GroupedOperand
from fp8compile.ops.layer.grouped_linear import grouped_output
from fp8compile.ops.layer.grouped_operands import GroupedOperands
from fp8compile.ops.layer.linear import GRAD_INPUT, OUTPUT
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.packing import one_a_byte
from fp8compile.quantizers import Gemm, Recipe
from fp8compile.tensor.layer import unserved
from fp8compile.tensor.quantized import LAYERS, QuantizedTensor, has_codes

__all__ = ["is_stack"]


def is_stack(tensor: object) -> bool:
    """Whether a tensor is codes of a stack of matrices, each quantized for itself."""
    return isinstance(tensor, QuantizedTensor) and tensor.batch == 1


def _operands(x: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe, gemm: Gemm) -> GroupedOperands:
    if has_codes(x) or not is_stack(weight):
        raise TypeError(
            "grouped_linear: only the weight may be quantized, as codes of each matrix by itself; the layer quantizes "
            "its rows, and any other weight, itself. Pass .dequantize()."
        )
    other = weight.quantizer_for_grad_input
    if unserved(weight.quantizer, recipe, other) is not None:
        made = f"{weight.quantizer!r}" if other is None else f"{weight.quantizer!r} and {other!r}"
        raise ValueError(
            f"grouped_linear: the weight has codes of {made}; the recipe quantizes it by {recipe.weight!r} for the "
            f"output and by {recipe.weight_for_grad_input!r} for grad_input. Set the recipe of experts before their "
            "weights are made codes, or gathered as codes."
        )
    own = weight.set_of(gemm)
    codes, quantizer = one_a_byte(own.codes, own.quantizer)
    codes = GroupedOperand(codes=codes, scale=own.scale, quantizer=quantizer, outer_scale=own.outer_scale)
    phase = Phase.of(gemm, own.codes)
    return GroupedOperands(recipe, offsets, phase, codes, weight_in_turns=weight.in_memory is not None)


def _linear(func: Any, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    operands = _operands(x, weight, offsets, recipe, OUTPUT)
    return _compat.as_kernel(grouped_output)(x, weight, offsets, bias, operands)


def _grad_input(func: Any, grad_output: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe) -> Tensor:
    operands = _operands(grad_output, weight, offsets, recipe, GRAD_INPUT)
    return _compat.as_kernel(operands.grad_input)(grad_output, weight)


LAYERS.update({ops.grouped_linear: _linear, ops.grouped_grad_input: _grad_input})
