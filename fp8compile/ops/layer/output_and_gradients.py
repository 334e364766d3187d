"""The three GEMMs of a linear layer, for every placement.

    output       y  = x @ w^T + b
    grad_input   dx = dy @ w
    grad_weight  dw = dy^T @ x

Eager mode runs the functions in an op's kernel; under Inductor an op's decomposition puts them into the graph. The
backward gets x and w themselves, each only if a gradient needs it, or codes of x (`kept_input`). With groups
(``ends``), each row is multiplied by the matrix of its group. Rows after the last group are zeros in y and in dx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.layout.four_bit_packing import with_a_code_a_byte
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.groups.padding import group_to_read, zero_behind
from fp8compile.ops.layer.check_recipe_of_groups import check_recipe_of_groups
from fp8compile.ops.layer.kept_input import Kept, keep_input, kept_input_as_quantized
from fp8compile.ops.layer.multiply_over_ranks import as_read, multiply_parts
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, STEPS, Operands, Phase
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.quantize_both import is_pair
from fp8compile.quantizers import Gemm, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = [
    "check",
    "for_gradients_of",
    "for_trained_weight",
    "grad_input",
    "grad_weight",
    "grad_weight_of_codes",
    "keep",
    "operands_of",
    "output",
    "part_of_tokens",
]


def operands_of(recipe: Recipe, phase: Phase, ends: Tensor | None, given: dict[str, Any]) -> Operands:
    """Return the `Operands` of one GEMM; ``given`` are further keyword arguments, from the layer's placement."""
    return Operands(recipe if ends is None else with_a_code_a_byte(recipe), phase, **given)


def part_of_tokens(tokens: Tensor, layout: TensorLayout) -> Plain:
    """Return the tokens as an operand of a GEMM: flattened to a matrix, unless ranks shard one of their dims."""
    return Plain(tokens if layout.cuts else as_matrix(tokens), layout)


def check(x: Tensor, ends: Tensor | None, place: Placement, recipe: Recipe) -> None:
    """Raise a ValueError if a layer with placement ``place`` can't run with this recipe or state."""
    # checked in the op, because PyTorch 2.11 traces no method of a recipe
    place.check(x, recipe)
    if ends is not None:
        check_recipe_of_groups(recipe)


# ---------------------------------------------------------------------------------- the three products


def output(
    phase: Phase,
    tensors: Sequence[Any],
    ends: Tensor | None,
    place: Placement,
    recipe: Recipe,
    codes: dict[str, Any] | None = None,
) -> Any:
    """Compute the output; with delayed scaling also the multipliers used and the amaxes of x and weight.

    Args:
        phase: Whether the code runs in eager mode, or in which kind of graph.
        tensors: Input, weight, and bias or None.
        ends: The ends of the groups of rows, or None.
        place: Which shards are on this rank.
        recipe: Quantizers for the operands.
        codes: Keyword arguments of `Operands` if the weight is quantized already.
    """
    x, weight, bias = tensors
    check(x, ends, place, recipe)
    layouts = place.layouts(x.ndim, ends)
    operands, beside = operands_of(recipe, phase, ends, {**place.given(), **(codes or {})}), None
    weight = place.cast(weight, x.dtype)
    if place.has_state:
        stateful: Any = place
        operands, beside = stateful.begin(x, weight, operands)
    own_bias = None if bias is None or ends is not None else Plain(bias, layouts.bias)
    parts = part_of_tokens(x, layouts.input), Plain(weight, layouts.weight)
    y = place.finish(multiply_parts(OUTPUT, *parts, operands, own_bias), layouts.output, x.shape)
    if bias is not None and ends is not None:
        y = zero_behind(y + as_read(bias, phase)[group_to_read(ends, y.shape[0])], ends)
    return y if beside is None else (y, *beside)


def grad_input(
    phase: Phase,
    tensors: Sequence[Any],
    ends: Tensor | None,
    place: Placement,
    recipe: Recipe,
    codes: dict[str, Any] | None = None,
) -> Tensor:
    """Compute the gradient of the input from grad_output and the weight; other arguments are those of `output`."""
    grad_output, weight = tensors
    if phase is Phase.BACKWARD:
        inductor.repeat_in_backward(grad_output)
    layouts = place.layouts(grad_output.ndim, ends)
    operands = operands_of(recipe, phase, ends, {**place.given(), **(codes or {})})
    parts = part_of_tokens(grad_output, layouts.output), Plain(place.cast(weight, grad_output.dtype), layouts.weight)
    return place.finish(multiply_parts(GRAD_INPUT, *parts, operands), layouts.input, grad_output.shape)


def grad_weight(phase: Phase, tensors: Sequence[Any], ends: Tensor | None, place: Placement, recipe: Recipe) -> Tensor:
    """Compute the gradient of the weight from grad_output and the input; other arguments are those of `output`."""
    grad_output, x = tensors
    layouts = place.layouts(x.ndim, ends)
    operands = operands_of(recipe, phase, ends, place.given())
    parts = part_of_tokens(grad_output, layouts.output), part_of_tokens(x, layouts.input)
    return place.reduced(multiply_parts(GRAD_WEIGHT, *parts, operands).local, phase)


def grad_weight_of_codes(
    phase: Phase, tensors: Sequence[Any], ends: Tensor | None, place: Placement, recipe: Recipe
) -> Tensor:
    """Compute the gradient of the weight from grad_output and the three tensors that `keep` returned.

    Other arguments are those of `output`.
    """
    grad_output, *kept = tensors
    layouts = place.layouts(grad_output.ndim, ends)
    grad = part_of_tokens(grad_output, layouts.output)
    quantizer = recipe.quantizer_read(GRAD_WEIGHT.b)
    found = kept_input_as_quantized((kept[0], kept[1], kept[2]), quantizer, layouts.input, grad.local.shape[0])
    operands = operands_of(recipe, phase, ends, {**place.given(), "input": found})
    x = Plain(found.codes, layouts.input)
    return place.reduced(multiply_parts(GRAD_WEIGHT, grad, x, operands).local, phase)


def keep(phase: Phase, tensors: Sequence[Any], ends: Tensor | None, place: Placement, quantizer: Quantizer) -> Kept:
    """Quantize the input, the only entry of ``tensors``, for grad_weight; other arguments are those of `output`.

    Returns codes, scales of blocks, and the outer scale: one for the whole input, or one for each group.
    """
    (x,) = tensors
    return keep_input(Plain(x, place.layouts(x.ndim, ends).input), quantizer, STEPS[phase])


# ---------------------------------------------------------------------------------- what a backward needs


@cache
def _for_one_gradient(recipe: Recipe, gemm: Gemm) -> Recipe:
    """Return the recipe for a backward that computes only one gradient, by ``gemm``.

    The other GEMM's quantizers are left out if one kernel would quantize grad_output for both gradients.
    """
    if not is_pair(recipe.grad_output, recipe.grad_output_for_grad_weight):
        return recipe
    other = GRAD_INPUT if gemm is GRAD_WEIGHT else GRAD_WEIGHT
    kept = recipe.keep_weight_codes and gemm is GRAD_INPUT
    no_quantizers: dict[str, Any] = {other.a: None, other.b: None}
    return replace(recipe, **no_quantizers, keep_weight_codes=kept)


def for_gradients_of(recipe: Recipe, *, x: bool, weight: bool) -> Recipe:
    """Return the recipe for a backward that computes the gradient of x, of the weight, or of both."""
    if (x and weight) or _compat.is_stand_in(recipe):
        return recipe
    return _for_one_gradient(recipe, GRAD_INPUT if x else GRAD_WEIGHT)


@cache
def _without_grad_weight(recipe: Recipe) -> Recipe:
    return replace(recipe, grad_output_for_grad_weight=None, input_for_grad_weight=None)


def for_unwritten_weight(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Return ``args``, the arguments of a layer's op, unless the traced graph has written to the weight, ``args[1]``.

    Raises:
        ValueError: The graph has written to the weight, so the weight's codes are out of date.
    """
    if _compat.is_written_in_graph(args[1]):
        raise ValueError(
            "cache_weights: a compiled function writes to a weight, through .data or by a torch._foreach op, and then "
            "multiplies by its codes, which were made before. Write to weights outside of the compiled function, or "
            "leave cache_weights out of this layer's recipe."
        )
    return args


def for_trained_weight(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Return a layer op's arguments; if the weight is frozen, without the recipe's quantizers for grad_weight.

    A recipe with ``dequantized_gradients`` is not changed.
    """
    *others, recipe = args
    if needs_input_grad[1] or _compat.is_stand_in(recipe) or recipe.dequantized_gradients:
        return args
    return *others, _without_grad_weight(recipe)
