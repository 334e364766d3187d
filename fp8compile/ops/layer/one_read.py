"""Operands whose tensor is read once for two purposes, by kernels that do that, where ranks need not talk first.

    weight         codes for the output, and the amaxes that grad_input casts it by       `quantize_weight`
    grad_output    codes along rows and along tokens                                      `quantize_both`
    both, and x    the same in four bits, after one read for the amaxes of both           `quantize_two_levels`

Forward and backward, or the two gradients, ask for the same call, and a graph has one of it.
"""

from __future__ import annotations

from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.ops.layer.local_shards import LocalShard, QuantizedShard
from fp8compile.ops.layer.quantize_shard import Steps, is_aligned, quantize_shard
from fp8compile.ops.outer_amaxes import outer_amaxes
from fp8compile.ops.quantize_both import is_pair, quantize_both
from fp8compile.ops.quantize_two_levels import is_packed_pair, quantize_two_levels
from fp8compile.ops.quantize_weight import is_weight_pair, quantize_weight
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.quantizers import GEMMS, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.quantizers.hadamard import GROUP

__all__ = ["by_one_read"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ALONG_TOKENS = {GRAD_INPUT.a: GRAD_WEIGHT.a, OUTPUT.a: GRAD_WEIGHT.b}  # of the slot along rows of one tensor
ALONG_ROWS = {columns: rows for rows, columns in ALONG_TOKENS.items()}


def by_one_read(part: LocalShard, slot: str, recipe: Recipe, steps: Steps) -> QuantizedShard:
    """Quantize a part for a slot of the recipe, by such a kernel if there is one, otherwise by steps."""
    quantizer = getattr(recipe, slot)
    if slot == OUTPUT.b and _has_weight_kernel(part, recipe):
        codes, scale, _ = _quantize_weight(part.local, quantizer, recipe.weight_for_grad_input)
        return QuantizedShard(codes, scale, quantizer, part.cuts)
    if slot == GRAD_INPUT.b and _has_weight_kernel(part, recipe):
        _, _, amax = _quantize_weight(part.local, recipe.weight, quantizer)
        return quantize_shard(part, quantizer, steps, local_amax=amax)
    row_slot = ALONG_ROWS.get(slot, slot)
    if row_slot not in ALONG_TOKENS:
        return quantize_shard(part, quantizer, steps)
    rows, columns = getattr(recipe, row_slot), getattr(recipe, ALONG_TOKENS[row_slot])
    if row_slot == GRAD_INPUT.a and _has_grad_kernel(part, rows, columns):
        return _both_directions(part, rows, columns)[slot != row_slot]
    if _has_packed_kernel(part, rows, columns):
        return _both_packed(part, rows, columns)[slot != row_slot]
    return quantize_shard(part, quantizer, steps)


# ---------------------------------------------------------------------------------- codes of eight bits

_quantize_weight = inductor.once_a_graph(quantize_weight)


def _has_weight_kernel(weight: LocalShard, recipe: Recipe) -> bool:
    """Whether one kernel does it, and would read nothing that could have stayed in the kernel that makes it."""
    first, again = recipe.weight, recipe.weight_for_grad_input
    return (
        is_weight_pair(first, again, weight.local.shape[1])
        and is_aligned(weight, first)
        and not inductor.is_fusible(weight.local)
    )


def _has_grad_kernel(grad_output: LocalShard, rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether one kernel quantizes a grad_output for both gradients.

    One that Inductor makes, such as that of an activation, is quantized by the kernel that makes it.
    """
    return (
        is_pair(rows, columns)
        and all(is_aligned(grad_output, each) for each in (rows, columns))
        and not inductor.is_fusible(grad_output.local)
    )


def _both_directions(part: LocalShard, rows: Quantizer, columns: Quantizer) -> tuple[QuantizedShard, QuantizedShard]:
    codes, scale, *along_tokens = quantize_both(as_matrix(part.local), rows, columns)
    found = (codes, scale, rows), (*along_tokens, columns)
    shape = part.local.shape
    first, second = (
        QuantizedShard(codes.view(shape), scale.view(quantizer.scale_shape(shape)), quantizer, part.cuts)
        for codes, scale, quantizer in found
    )
    return first, second


# ---------------------------------------------------------------------------------- of four bits


def _has_packed_kernel(part: LocalShard, rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether one kernel makes packed codes of both directions: of a whole matrix of groups of sixteen."""
    sizes = part.local.shape
    return (
        is_packed_pair(rows, columns)
        and not part.cuts
        and len(sizes) == len(rows.block)
        and all(_compat.statically_true(size % GROUP == 0) and _compat.statically_true(size > 0) for size in sizes)
    )


@inductor.once_a_graph
def _quantize_two_levels(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, ...]:
    if inductor.is_fusible(x):
        x = rounded(x).to(x.dtype)  # as eager mode reads it: the kernel that makes it holds more digits
    laid_down, *amaxes = outer_amaxes(x, rows, columns)
    return quantize_two_levels(laid_down, *amaxes, rows, columns)


def _both_packed(part: LocalShard, rows: Quantizer, columns: Quantizer) -> tuple[QuantizedShard, QuantizedShard]:
    codes, scale, outer, *along_tokens = _quantize_two_levels(part.local, rows, columns)
    column_codes, column_scale, column_outer = along_tokens
    return (
        QuantizedShard(codes, scale, rows, (), outer_scale=outer),
        QuantizedShard(column_codes, column_scale, columns, (), outer_scale=column_outer),
    )
