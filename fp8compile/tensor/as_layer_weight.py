"""Run the ops of linear and grouped linear layers on the codes of a weight that is a QuantizedTensor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.four_bit_packing import are_same_codes, one_a_byte
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.layer import LAYER_OPS
from fp8compile.ops.layer.layer_args import LayerArgs
from fp8compile.ops.layer.layer_ops import COMPUTE, TAIL
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.ops.layer.operands import Phase
from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe
from fp8compile.tensor.quantized_tensor import LAYERS, QuantizedTensor, cuts_blocks, has_codes, no_meaning

__all__ = ["check_serves", "codes_for", "is_served", "is_stack", "unserved"]


@_compat.constant_when_traced
def unserved(quantizer: Quantizer, recipe: Recipe, for_grad_input: Quantizer | None = None) -> str | None:
    """Return why a layer with ``recipe`` can't multiply the codes of a quantized weight; None if it can.

    ``quantizer`` made the codes; ``for_grad_input`` made separate codes for grad_input, if there are any.
    """
    if for_grad_input is not None:
        wanted = zip((quantizer, for_grad_input), (recipe.weight, recipe.weight_for_grad_input), strict=True)
        if all(are_same_codes(*each) for each in wanted):
            return None
        return (
            f"the weight was quantized by {quantizer!r} for the output and by {for_grad_input!r} for grad_input, "
            f"but the recipe has {recipe.weight!r} and {recipe.weight_for_grad_input!r}. Set the recipe of a layer "
            "before its weight is quantized, or all-gathered in FP8."
        )
    if recipe.shares_weight_codes() and are_same_codes(quantizer, recipe.weight):
        return None
    return (
        f"`weight` is a QuantizedTensor of {quantizer!r}, but the recipe quantizes weights by {recipe.weight!r} for "
        f"the output and by {recipe.weight_for_grad_input!r} for grad_input. A quantized weight requires a recipe "
        "with the same quantizer for both, as in fp8compile.recipes.tensorwise() and blockwise(). Use such a "
        "recipe and its weight quantizer, or pass weight.dequantize()."
    )


def check_serves(function: str, weight: QuantizedTensor, recipe: Recipe) -> None:
    """Raise a ValueError if a layer with ``recipe`` can't multiply the codes of ``weight``.

    ``function`` is the name of the called function, with which the error's text begins.
    """
    if (reason := unserved(weight.quantizer, recipe, weight.quantizer_for_grad_input)) is not None:
        raise ValueError(f"{function}: {reason}")


def is_stack(tensor: object) -> bool:
    """Whether ``tensor`` is a QuantizedTensor of stacked weights of experts, each with its own scales."""
    return isinstance(tensor, QuantizedTensor) and tensor.batch == 1


def _check_weight(function: str, x: Tensor, weight: QuantizedTensor, recipe: Recipe) -> None:
    if has_codes(x) or not has_codes(weight):
        raise TypeError(
            f"{function}: only `weight` can be a QuantizedTensor, because the layer quantizes its other operands "
            "itself. Pass .dequantize() for them, or multiply quantized matrices with fp8compile.scaled_mm."
        )
    check_serves(function, weight, recipe)
    if weight.quantizer_for_grad_input is None and cuts_blocks(weight):
        raise ValueError(
            f"{function}: `weight` is a shard of sizes {weight.sizes} along dim {weight.shard_dim}, which splits "
            f"blocks {weight.quantizer.block}. Call .all_gather({weight.shard_dim}) first."
        )


def _check_matrices(x: Tensor, weight: Any, recipe: Recipe) -> None:
    if has_codes(x) or not is_stack(weight):
        raise TypeError(
            "grouped_linear: only `weight` can be quantized, with each matrix quantized separately, because the "
            "layer quantizes its rows and any other weight itself. Pass .dequantize()."
        )
    other = weight.quantizer_for_grad_input
    if unserved(weight.quantizer, recipe, other) is not None:
        made = f"{weight.quantizer!r}" if other is None else f"{weight.quantizer!r} and {other!r}"
        raise ValueError(
            f"grouped_linear: the weight was quantized with {made}, but the recipe quantizes it with "
            f"{recipe.weight!r} for the output and with {recipe.weight_for_grad_input!r} for grad_input. Set the "
            "recipe of experts before their weights are quantized, or all-gathered in FP8."
        )


def codes_for(weight: QuantizedTensor, gemm: Gemm) -> Quantized:
    """Return the codes of a quantized weight that ``gemm`` reads; those of stacked weights have one code a byte."""
    own = weight.set_of(gemm)
    if not weight.batch:
        return own
    codes, quantizer = one_a_byte(own.codes, own.quantizer)
    return replace(own, codes=codes, quantizer=quantizer)


def is_served(args: LayerArgs) -> bool:
    """Whether a layer with these arguments multiplies the FP8 data of a weight that is a QuantizedTensor."""
    known = args.known
    return args.sharding == UNSHARDED and known.codes is None and known.outer_amax is None


def _run(func: Any, *args: Any) -> Any:
    """Run an op of a layer on the codes of its weight; the op quantizes its other operand."""
    gemm, layer = LAYER_OPS[func], LayerArgs.of(*args[-TAIL:])
    x, weight, *others = args[:-TAIL]
    if not is_served(layer):
        raise TypeError(no_meaning(func, weight if has_codes(weight) else None))
    if layer.offs is not None:
        _check_matrices(x, weight, layer.recipe)
    else:
        _check_weight("linear" if gemm is GEMMS[0] else "grad_input", x, weight, layer.recipe)
    found = codes_for(weight, gemm)
    run = partial(COMPUTE[func], weight=found, weight_in_turns=weight.in_memory is not None)
    return _compat.as_kernel(run)(Phase.of(gemm, found.codes), x, weight, *others, layer)


# ops that multiply the codes of a quantized weight
LAYERS.update(dict.fromkeys([op for op, gemm in LAYER_OPS.items() if gemm is not GEMMS[2]], _run))
