"""The three GEMMs of a linear layer, wherever its tensors are stored.

    output       y  = x @ w^T + b
    grad_input   dx = dy @ w
    grad_weight  dw = dy^T @ x

Eager mode runs the functions in an op's kernel; under Inductor an op's decomposition puts them into the graph. The
backward gets x and w themselves, each only if a gradient needs it. With groups (``offs``), each row is multiplied by
the matrix of its group. Rows after the last group are zeros in y and in dx.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.layout.quantized import Plain
from fp8compile.ops.cast_transpose import is_pair
from fp8compile.ops.groups.padding import group_to_read, zero_behind
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer.delayed_scaling_state import amax_of, kept_amax
from fp8compile.ops.layer.layer_args import LayerArgs, check_layer, part_of_tokens
from fp8compile.ops.layer.multiply_over_ranks import as_read, multiply_parts
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Operands, Phase
from fp8compile.quantizers import CALL, Gemm, Recipe

__all__ = [
    "delayed_output",
    "for_gradients_of",
    "for_trained_weight",
    "check_unwritten",
    "grad_input",
    "grad_weight",
    "output",
]

# ---------------------------------------------------------------------------------- the three products


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, args: LayerArgs, operands: Operands) -> Tensor:
    layouts, offs = args.sharding.layouts(x.ndim, args.sizes, args.offs), args.offs
    own_bias = None if bias is None or offs is not None else Plain(bias, layouts.bias)
    parts = part_of_tokens(x, layouts.input), Plain(weight, layouts.weight)
    y = args.sharding.finish(multiply_parts(OUTPUT, *parts, operands, own_bias), layouts.output, x.shape)
    if bias is not None and offs is not None:
        y = zero_behind(y + as_read(bias, operands.phase)[group_to_read(offs, y.shape[0])], offs)
    return y


def output(phase: Phase, x: Tensor, weight: Tensor, bias: Tensor | None, args: LayerArgs, /, **given: Any) -> Tensor:
    """Compute the output.

    ``phase`` says whether the code runs in eager mode, or in which kind of graph; ``given`` are fields of `Operands`
    for a weight that is a `QuantizedTensor`.
    """
    check_layer(args, OUTPUT)
    weight = args.sharding.cast(weight, x.dtype)
    return _output(x, weight, bias, args, args.operands(phase, weight, OUTPUT.b, **given))


def delayed_output(
    phase: Phase,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiplier: Tensor,
    history: Tensor | None,
    args: LayerArgs,
    /,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the output with delayed scaling; also return the multipliers used and the amaxes of x and weight.

    ``multiplier`` and ``history`` are the layer's state; without a history, the weight is no `QuantizedTensor`. Other
    arguments are those of `output`.
    """
    check_layer(args, OUTPUT, has_state=True)
    weight, used = args.sharding.cast(weight, x.dtype), snapshot(multiplier)
    of_input, of_weight, _ = args.recipe.delayed()
    if given.get("weight") is None or history is None:
        amaxes = amax_of(x, of_input), amax_of(weight, of_weight)
    else:
        amaxes = amax_of(x, of_input), amax_of(x, None) if of_weight is None else kept_amax(history)
    waits_for = amaxes if phase is Phase.FORWARD else ()
    operands = args.operands(phase, weight, OUTPUT.b, multiplier=used, waits_for=waits_for, **given)
    return _output(x, weight, bias, args, operands), used, *amaxes


def grad_input(phase: Phase, grad_output: Tensor, weight: Tensor, args: LayerArgs, /, **given: Any) -> Tensor:
    """Compute the gradient of the input from grad_output and the weight; other arguments are those of `output`."""
    check_layer(args, GRAD_INPUT)
    if phase is Phase.BACKWARD:
        inductor.repeat_in_backward(grad_output)
    layouts, sharding = args.sharding.layouts(grad_output.ndim, args.sizes, args.offs), args.sharding
    weight = sharding.cast(weight, grad_output.dtype)
    parts = part_of_tokens(grad_output, layouts.output), Plain(weight, layouts.weight)
    product = multiply_parts(GRAD_INPUT, *parts, args.operands(phase, weight, GRAD_INPUT.b, **given))
    return sharding.finish(product, layouts.input, grad_output.shape)


def grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, weight_dtype: torch.dtype, args: LayerArgs) -> Tensor:
    """Compute the gradient of the weight from grad_output and the input."""
    check_layer(args, GRAD_WEIGHT)
    layouts = args.sharding.layouts(x.ndim, args.sizes, args.offs)
    parts = part_of_tokens(grad_output, layouts.output), part_of_tokens(x, layouts.input)
    product = multiply_parts(GRAD_WEIGHT, *parts, args.operands(phase)).local
    return args.sharding.reduce_grad_weight(product, weight_dtype, phase)


# ---------------------------------------------------------------------------------- what a backward needs


@cache
def _for_one_gradient(recipe: Recipe, gemm: Gemm) -> Recipe:
    """Return the recipe for a backward that computes only one gradient, by ``gemm``.

    The other GEMM's quantizers are left out if one kernel would quantize grad_output for both gradients.
    """
    if not is_pair(recipe.grad_output, recipe.grad_output_for_grad_weight):
        return recipe
    other = GRAD_INPUT if gemm is GRAD_WEIGHT else GRAD_WEIGHT
    lifetime = recipe.weight_lifetime if gemm is GRAD_INPUT else CALL
    no_quantizers: dict[str, Any] = {other.a: None, other.b: None}
    return replace(recipe, **no_quantizers, weight_lifetime=lifetime)


def for_gradients_of(recipe: Recipe, *, x: bool, weight: bool) -> Recipe:
    """Return the recipe for a backward that computes the gradient of x, of the weight, or of both."""
    if (x and weight) or _compat.is_stand_in(recipe):
        return recipe
    return _for_one_gradient(recipe, GRAD_INPUT if x else GRAD_WEIGHT)


@cache
def _without_grad_weight(recipe: Recipe) -> Recipe:
    return replace(recipe, grad_output_for_grad_weight=None, input_for_grad_weight=None)


def check_unwritten(weight: Tensor) -> None:
    """Raise a ValueError if the traced graph has written to a weight, whose FP8 data is then out of date."""
    if _compat.is_written_in_graph(weight):
        raise ValueError(
            "weight_lifetime='step': a compiled function writes to a weight, through .data or a torch._foreach op, "
            "and then uses the weight's cached quantized data, which is stale. Write to weights outside of the "
            "compiled function, or use weight_lifetime='call' for this layer."
        )


def for_trained_weight(recipe: Recipe, *, is_trained: bool) -> Recipe:
    """Return a recipe; if the weight is frozen, without the quantizers for grad_weight.

    A recipe with ``dequantized_gradients`` is not changed.
    """
    if is_trained or _compat.is_stand_in(recipe) or recipe.dequantized_gradients:
        return recipe
    return _without_grad_weight(recipe)
