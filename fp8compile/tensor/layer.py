"""A QuantizedTensor as the weight of a layer: its own codes are the operand, in both directions.

One with two sets of codes has its own for each direction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8compile import _compat, ops
from fp8compile.ops.layer.delayed import delayed_output
from fp8compile.ops.layer.linear import GRAD_INPUT, OUTPUT, layer_grad_input, layer_output
from fp8compile.ops.layer.local_shards import QuantizedShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.packing import are_same_codes
from fp8compile.quantizers import Gemm, Quantizer, Recipe
from fp8compile.tensor.quantized import LAYERS, QuantizedTensor, cuts_blocks, has_codes

__all__ = ["check_serves", "unserved"]


@_compat.constant_when_traced
def unserved(quantizer: Quantizer, recipe: Recipe, for_grad_input: Quantizer | None = None) -> str | None:
    """Why a layer with this recipe can't run on a weight's codes that a quantizer made, as text; None if it can.

    Args:
        quantizer: What made the codes for the output.
        recipe: Of the layer.
        for_grad_input: What made those for grad_input, if they are others.
    """
    if for_grad_input is not None:
        wanted = zip((quantizer, for_grad_input), (recipe.weight, recipe.weight_for_grad_input), strict=True)
        if all(are_same_codes(*each) for each in wanted):
            return None
        return (
            f"weight has codes of {quantizer!r} for the output and of {for_grad_input!r} for grad_input; the recipe "
            f"asks for {recipe.weight!r} and {recipe.weight_for_grad_input!r}. Set the recipe of a layer before its "
            "weight is made codes, or gathered as codes."
        )
    if recipe.shares_weight_codes() and are_same_codes(quantizer, recipe.weight):
        return None
    return (
        f"weight is a QuantizedTensor of {quantizer!r}; the recipe quantizes weights by {recipe.weight!r} for the "
        f"output and by {recipe.weight_for_grad_input!r} for grad_input. Codes serve a recipe that has their "
        "quantizer in both places, as fp8compile.recipes.tensorwise() and blockwise() have theirs. "
        "Take such a recipe and quantize by its weight, or pass weight.dequantize()."
    )


def check_serves(function: str, weight: QuantizedTensor, recipe: Recipe) -> None:
    """Raise a ValueError, in the name of ``function``, if a layer with this recipe can't run on these codes."""
    if (reason := unserved(weight.quantizer, recipe, weight.quantizer_for_grad_input)) is not None:
        raise ValueError(f"{function}: {reason}")


def _check_weight(function: str, x: Tensor, weight: QuantizedTensor, recipe: Recipe) -> None:
    if has_codes(x) or not has_codes(weight):
        raise TypeError(
            f"{function}: only the weight may be a QuantizedTensor, the layer quantizes its other operands itself. "
            "Pass .dequantize() for them, or multiply quantized matrices by fp8compile.scaled_mm."
        )
    check_serves(function, weight, recipe)
    if weight.quantizer_for_grad_input is None and cuts_blocks(weight):
        raise ValueError(
            f"{function}: weight is a shard of sizes {weight.sizes} along dim {weight.shard_dim}, which cuts blocks "
            f"{weight.quantizer.block}. Call .all_gather({weight.shard_dim}) first."
        )


def _operands(weight: QuantizedTensor, recipe: Recipe, gemm: Gemm) -> Operands:
    """The weight's own codes; in a graph the other operand is quantized as its compiler would have it."""
    own = weight.set_of(gemm)
    codes = QuantizedShard(own.codes, own.scale, own.quantizer, (), outer_scale=own.outer_scale)
    return Operands(recipe, Phase.of(gemm, own.codes), weight=codes, weight_in_turns=weight.in_memory is not None)


def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_weight("linear", x, weight, recipe)
    return _compat.as_kernel(layer_output)(x, weight, bias, _operands(weight, recipe, OUTPUT))


def _grad_input(func: Any, grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    _check_weight("grad_input", grad_output, weight, recipe)
    return _compat.as_kernel(layer_grad_input)(grad_output, weight, _operands(weight, recipe, GRAD_INPUT))


def _delayed_linear(
    func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, multiplier: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    recipe = others[-1]
    _check_weight("linear", x, weight, recipe)
    operands = _operands(weight, recipe, OUTPUT)
    return _compat.as_kernel(delayed_output)(x, weight, bias, history, multiplier, operands)


def _delayed_grad_input(func: Any, grad_output: Tensor, weight: Tensor, multiplier: Tensor, recipe: Recipe) -> Tensor:
    _check_weight("grad_input", grad_output, weight, recipe)
    operands = replace(_operands(weight, recipe, GRAD_INPUT), multiplier=multiplier)
    return _compat.as_kernel(layer_grad_input)(grad_output, weight, operands)


LAYERS.update(
    {
        ops.linear: _linear,
        ops.grad_input: _grad_input,
        ops.delayed_linear: _delayed_linear,
        ops.delayed_grad_input: _delayed_grad_input,
    }
)
