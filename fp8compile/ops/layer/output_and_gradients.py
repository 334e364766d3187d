"""The three GEMMs of a linear layer, wherever its tensors are stored.

    output       y  = x @ w^T + b
    grad_input   dx = dy @ w
    grad_weight  dw = dy^T @ x

Eager mode runs the functions in an op's kernel; under Inductor an op's decomposition puts them into the graph. The
backward gets x and w themselves, each only if a gradient needs it. With groups (``offs``), each row is multiplied by
the matrix of its group. Rows after the last group are zeros in y and in dx.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.layout.cuts import SIDES, Sharding
from fp8compile.layout.quantized import Plain, Quantized, as_operand
from fp8compile.ops.cast_transpose import is_pair
from fp8compile.ops.collectives import sent_in_backward
from fp8compile.ops.gemms.grouped.grouped_mm import grouped_mm
from fp8compile.ops.groups.padding import group_to_read, zero_behind
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer.delayed_scaling_state import amax_of, kept_amax
from fp8compile.ops.layer.gather_operands import gather, narrow
from fp8compile.ops.layer.layer_args import LayerArgs, check_layer, part_of_tokens
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Operands, Phase, as_read
from fp8compile.ops.layer.sharded_gemm import GroupPlan, Product, redistribute
from fp8compile.quantizers import CALL, Gemm, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = [
    "delayed_output",
    "for_gradients_of",
    "for_trained_weight",
    "check_unwritten",
    "grad_input",
    "grad_weight",
    "multiply_parts",
    "output",
]

# ---------------------------------------------------------------------------------- one GEMM


def _multiply_codes(
    gemm: Gemm, a: Quantized, b: Quantized, plans: list[GroupPlan], out_dtype: torch.dtype, operands: Operands
) -> Tensor:
    (left, *left_windows), (right, *right_windows) = as_operand(a), as_operand(b)
    if operands.phase is not Phase.EAGER:
        gathered = [plan.gather for plan in plans]  # these are in memory already, so `laid_out` need not store them
        left = left if "a" in gathered else operands.laid_out(left, gemm.a)
        right = right if "b" in gathered else operands.laid_out(right, gemm.b)
    product = operands.multiply(left, right, out_dtype, gemm)
    # cut the windows' zeros off both sides of the result; along the summed dim zeros change nothing
    windows = left_windows[gemm.a_transposed], right_windows[not gemm.b_transposed]
    for dim, window in zip(SIDES, windows, strict=True):
        product = product if window is None else window.extract(product, dim)
    return product


def _product_as_is(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None = None) -> Product:
    """Gather or narrow two operands as the GEMM needs, then multiply them in their own dtype, without quantizing."""
    weight = b.cuts
    a, b, plans = redistribute(gemm, a, b) if a.cuts else (a, b, [])
    if (offs := a.layout.offs) is not None:
        right = b.local.transpose(-2, -1) if gemm is GRAD_INPUT else b.local
        local = grouped_mm(a.local, right, offs, operands.recipe.gemm_config(gemm))
        return Product(local, plans, a.cuts, a.local.shape)
    left, right = gemm.oriented(as_matrix(a.local), as_matrix(b.local))
    added = None if bias is None else _bias_of_columns(bias, plans, a.cuts, weight)
    local = left @ right if added is None else torch.addmm(added, left, right)
    return Product(local, plans, a.cuts, a.local.shape)


def multiply_parts(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None = None) -> Product:
    """Compute one GEMM of a layer, in the dtype of ``a``, from this rank's shards of the operands.

    ``operands`` quantizes ``a`` and ``b``, which are not transposed yet. If the recipe has no quantizers for the GEMM,
    both are multiplied in their own dtype. ``bias``, for an output without groups, is whole or sharded like the
    weight's rows; a product of codes is rounded before the bias is added.
    """
    if a.local.is_meta:
        return _product_as_is(gemm, a, b, operands, bias)  # meta tensors have no data: this gives shape and plans
    # A backward's collectives stay in the backward. If the partitioner hoisted them into the forward, a gather that
    # two layers share would be sent in both passes, and ranks of different sizes would hoist different collectives and
    # wait for each other.
    in_backward = gemm is not OUTPUT and any((*a.cuts, *b.cuts))
    if not in_backward and not operands.weight_in_turns:
        return _multiply_parts(gemm, a, b, operands, bias)
    with (
        sent_in_backward() if in_backward else nullcontext(),
        inductor.left_in_backward() if operands.weight_in_turns and gemm is GRAD_INPUT else nullcontext(),
    ):
        product = _multiply_parts(gemm, a, b, operands, bias)
    if operands.weight_in_turns and gemm is OUTPUT:
        inductor.never_recompute(product.local)
    return product


def _multiply_parts(gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None) -> Product:
    out_dtype = a.local.dtype
    if operands.recipe.quantizers(gemm) is None:
        left, right = (operands.in_high_precision(*each, out_dtype) for each in ((a, gemm.a), (b, gemm.b)))
        return _product_as_is(gemm, left, right, operands, bias)
    codes = operands.of(a, gemm.a), operands.of(b, gemm.b)
    a_codes, b_codes, plans = redistribute(gemm, *codes) if a.cuts else (*codes, [])
    product = _multiply_codes(gemm, a_codes, b_codes, plans, out_dtype, operands)
    if bias is not None and (added := _bias_of_columns(bias, plans, a_codes.cuts, b.cuts)) is not None:
        product = product + as_read(added, operands.phase)
    return Product(product, plans, a_codes.cuts, a_codes.codes.shape)


def _bias_of_columns(bias: Plain, plans: list[GroupPlan], a: Sharding, weight: Sharding) -> Tensor | None:
    """Return the bias for this rank's columns of the output; None if another rank adds it to its partial sum."""
    for index, plan in enumerate(plans):
        if plan.out == "n" and bias.cuts[index] is None:
            cut: Any = weight[index]
            bias = narrow(bias, index, replace(cut, dim=0))
        elif plan.out != "n" and bias.cuts[index] is not None:
            bias = gather(bias, index)
    summands: list[Any] = [cut for cut, plan in zip(a, plans, strict=True) if plan.out == "sum"]
    return None if any(cut.rank for cut in summands) else bias.local


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
