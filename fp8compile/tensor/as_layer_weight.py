"""Run the ops of linear and grouped linear layers on the codes of a weight that is a QuantizedTensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.four_bit_packing import are_same_codes, one_a_byte
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.layer import LAYER_OPS, OPS_OF_LAYERS, layer_ops
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.statistics.observe import OBSERVE_OPS
from fp8compile.ops.layer.statistics.pieces import Seen
from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe
from fp8compile.tensor.quantized_tensor import LAYERS, QuantizedTensor, cuts_blocks, has_codes

__all__ = ["check_serves", "codes_seen", "is_stack", "unserved"]


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
            f"{function}: only the weight may be a QuantizedTensor, the layer quantizes its other operands itself. "
            "Pass .dequantize() for them, or multiply quantized matrices by fp8compile.scaled_mm."
        )
    check_serves(function, weight, recipe)
    if weight.quantizer_for_grad_input is None and cuts_blocks(weight):
        raise ValueError(
            f"{function}: weight is a shard of sizes {weight.sizes} along dim {weight.shard_dim}, which cuts blocks "
            f"{weight.quantizer.block}. Call .all_gather({weight.shard_dim}) first."
        )


def _check_matrices(x: Tensor, weight: Any, recipe: Recipe) -> None:
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


def _codes(weight: QuantizedTensor, gemm: Gemm) -> Quantized:
    own = weight.set_of(gemm)
    if not weight.batch:
        return own
    codes, quantizer = one_a_byte(own.codes, own.quantizer)
    return replace(own, codes=codes, quantizer=quantizer)


def _run(func: Any, *args: Any) -> Any:
    """Run an op of a layer on the codes of its weight; the op quantizes its other operand."""
    op, gemm = OPS_OF_LAYERS[func], LAYER_OPS[func]
    x, weight, recipe = args[0], args[1], args[-1]
    if op.ends:
        _check_matrices(x, weight, recipe)
    else:
        _check_weight("linear" if gemm is GEMMS[0] else "grad_input", x, weight, recipe)
    found = _codes(weight, gemm)
    given = {"weight": found, "weight_in_turns": weight.in_memory is not None}
    return _compat.as_kernel(op.run)(Phase.of(gemm, found.codes), args, given)


def _observe(func: Any, *args: Any) -> Any:
    """Run a layer's statistics op on the codes and scales of its weight."""
    op = OBSERVE_OPS[func]
    if op.gradient:  # the forward has counted the weight's codes
        tokens, x, _, *others = args
        return _compat.as_kernel(op.run)(Phase.of(GEMMS[1], tokens), (tokens, x, None, *others))
    return _compat.as_kernel(op.run)(Phase.of(GEMMS[0], args[0]), args, codes_seen(args[2], args[-1]))


def codes_seen(weight: QuantizedTensor, recipe: Recipe) -> Seen:
    """Return the codes of a quantized weight by the recipe's field, such as ``"weight"``, for statistics.

    Codes for grad_input are left out if they share memory with those for the output. No codes if none fit ``recipe``.
    """
    if unserved(weight.quantizer, recipe, weight.quantizer_for_grad_input) is not None:
        return Seen(None)
    read = GEMMS[:1] if weight.in_memory is not None else GEMMS[:2]
    return Seen(None, codes={gemm.b: _codes(weight, gemm) for gemm in read})


SERVED = (layer_ops.LINEAR, layer_ops.DELAYED, layer_ops.GROUPED)
LAYERS.update(dict.fromkeys([op for layer in SERVED for op in (layer.output, layer.grad_input)], _run))
LAYERS.update(dict.fromkeys([op for each in SERVED for op in (each.observe.output, each.observe.gradient)], _observe))
