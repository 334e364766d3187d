"""Kernels that read a tensor once for two GEMMs, if no block of the tensor spans ranks.

    tensor                               what one read gives                                  kernel
    weight                               codes for the output, amaxes for grad_input's cast   `quantize_weight`
    stacked weights, square blocks       codes for the output, amaxes for grad_input's cast   `quantize_weight`
    stacked weights, rows and columns    codes for the output, amaxes for grad_input's cast   `group_quantize_rows`
    grad_output, FP8                     codes along rows and codes along tokens              `quantize_both`
    gradients that Inductor computes     codes in both directions, codes of x along tokens    `quantize_several`
    weight, blocks along columns         codes for grad_input, in the backward                `quantize_columns`
    grad_output or x, four bits          codes along rows and codes along tokens              `quantize_two_levels`

"Rows and columns" is one scale for each row in the output, and one for each column in grad_input. For gradients that
Inductor computes, such as an activation's, a pass over the joint graph replaces single steps by `quantize_several`.
Four bits need an earlier read for outer amaxes.

Each of the two GEMMs calls the kernel with equal arguments, and a compiled graph keeps a single call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.kernels.programs import TILE
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.fuse_noted import fuse_noted
from fp8compile.ops.groups.group_quantize_rows import ROWS_ONCE, is_row_pair
from fp8compile.ops.layer.quantize_over_ranks import Steps, is_aligned, quantize_part
from fp8compile.ops.noted_codes import noted_codes, noted_counts
from fp8compile.ops.outer_amaxes import outer_amaxes
from fp8compile.ops.quantize_both import is_pair, quantize_both, quantize_both_counted
from fp8compile.ops.quantize_columns import is_along_columns, quantize_columns, quantize_columns_counted
from fp8compile.ops.quantize_two_levels import is_packed_pair, quantize_two_levels, quantize_two_levels_counted
from fp8compile.ops.quantize_weight import is_weight_pair, quantize_weight, quantize_weight_counted
from fp8compile.ops.rounding_barrier import made_of_kept, rounded
from fp8compile.quantizers import GEMMS, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.quantizers.hadamard import GROUP

__all__ = ["ALONG_ROWS", "ALONG_TOKENS", "by_one_read", "is_noted"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ALONG_TOKENS = {GRAD_INPUT.a: GRAD_WEIGHT.a, OUTPUT.a: GRAD_WEIGHT.b}  # slot along rows -> slot along tokens
ALONG_ROWS = {columns: rows for rows, columns in ALONG_TOKENS.items()}


def by_one_read(part: Plain, slot: str, recipe: Recipe, steps: Steps, *, counts: bool = False) -> Quantized:
    """Quantize ``part`` for the recipe's field ``slot``, if possible by a kernel that reads it once for two GEMMs.

    If no kernel fits, ``steps`` quantize it. With ``counts``, the kernel also computes the statistics
    `Quantized.counts`.
    """
    quantizer = getattr(recipe, slot)
    if slot in (OUTPUT.b, GRAD_INPUT.b):
        return _weight(part, slot, recipe, steps, counts=counts)
    row_slot = ALONG_ROWS.get(slot, slot)
    rows, columns = getattr(recipe, row_slot), getattr(recipe, ALONG_TOKENS[row_slot])
    if row_slot == GRAD_INPUT.a and _has_grad_kernel(part, rows, columns):
        return _both_directions(part, rows, columns, counts=counts)[slot != row_slot]
    if _has_packed_kernel(part, rows, columns):
        return _both_packed(part, rows, columns, counts=counts)[slot != row_slot]
    if not counts and is_noted(part, slot, recipe):  # what counts reads codes that are not laid out
        return _noted(part, quantizer, steps, is_input=slot == GRAD_WEIGHT.b)
    return quantize_part(part, quantizer, steps)


# ---------------------------------------------------------------------------------- weights

_WEIGHT = inductor.once_with_more(quantize_weight, quantize_weight_counted)


def _weight(part: Plain, slot: str, recipe: Recipe, steps: Steps, *, counts: bool) -> Quantized:
    first: Any = recipe.weight  # not None: this function is called only for products that are quantized
    again: Any = recipe.weight_for_grad_input
    is_first = slot == OUTPUT.b
    quantizer = first if is_first else again
    if inductor.is_fusible(part.local) or not is_aligned(part, first):  # if fusible, its producer's kernel casts it
        return quantize_part(part, quantizer, steps)
    if part.layout.batch:
        return _matrices(part, quantizer, first, again, steps, is_first=is_first, counts=counts)
    if not is_first and is_along_columns(again) and is_aligned(part, again):
        return _along_columns(part, again, counts=counts)
    if not is_weight_pair(first, again, part.local.shape[1]):
        return quantize_part(part, quantizer, steps)
    codes, scale, amax, *counted = _WEIGHT[counts and is_first](part.local, first, again)
    if is_first:
        own = counted[0][0] if counted else None
        return Quantized(codes=codes, scale=scale, quantizer=first, layout=part.layout, counts=own)
    return quantize_part(part, again, steps, local_amax=amax)


def _matrices(
    part: Plain, quantizer: Quantizer, first: Quantizer, again: Any, steps: Steps, *, is_first: bool, counts: bool
) -> Quantized:
    """Quantize stacked weights for the output or for grad_input; if a kernel fits, one read serves both."""
    stack = part.local
    if is_pair(first, again) and not any(part.cuts) and not is_first:
        return _along_columns(part, again, counts=counts)
    matrix = stack.flatten(0, 1)
    if is_row_pair(first, again, matrix.shape[1]):
        codes, scale, amax, *counted = ROWS_ONCE[counts and is_first](matrix, _ends_of_matrices(stack), first, again)
    elif is_weight_pair(first, again, matrix.shape[1]):
        counts = counts and _compat.statically_true(stack.shape[1] % TILE == 0)  # no tile has rows of two matrices
        codes, scale, amax, *counted = _WEIGHT[counts and is_first](matrix, first, again)
    else:
        return quantize_part(part, quantizer, steps)
    if is_first:
        scale = scale.view(stack.shape[0], *first.scale_shape(stack.shape[1:]))
        own = counted[0][0] if counted else None
        return Quantized(codes=codes.view(stack.shape), scale=scale, quantizer=first, layout=part.layout, counts=own)
    amax = amax.view(stack.shape[0], *again.scale_shape(stack.shape[1:]))
    return quantize_part(part, again, steps, local_amax=amax)


_COLUMNS = inductor.once_with_more(quantize_columns, quantize_columns_counted)


def _along_columns(part: Plain, quantizer: Quantizer, *, counts: bool) -> Quantized:
    """Quantize a weight or stacked weights for grad_input by one kernel, in the backward."""
    with inductor.left_in_backward():  # in the forward it would be kept: a byte for each element of all weights
        codes, scale, *counted = _COLUMNS[counts](part.local, quantizer)
        own = counted[0][0] if counted else None
    return Quantized(codes=codes, scale=scale, quantizer=quantizer, layout=part.layout, counts=own)


@inductor.once_a_graph
def _ends_of_matrices(stack: Tensor) -> Tensor:
    return torch.arange(1, stack.shape[0] + 1, dtype=torch.int32, device=stack.device) * stack.shape[1]


# ---------------------------------------------------------------------------------- gradients, in eight bits


def _has_grad_kernel(grad_output: Plain, rows: Any, columns: Any) -> bool:
    """Whether one kernel quantizes grad_output for both gradients; not if Inductor computes grad_output pointwise."""
    return (
        is_pair(rows, columns)
        and all(is_aligned(grad_output, each) for each in (rows, columns))
        and not inductor.is_fusible(grad_output.local)
    )


def is_noted(part: Plain, slot: str, recipe: Recipe) -> bool:
    """Whether to mark the codes of ``part``, so that a pass over the joint graph can fuse several casts."""
    if slot not in (GRAD_INPUT.a, GRAD_WEIGHT.a, GRAD_WEIGHT.b):
        return False
    is_input = slot == GRAD_WEIGHT.b
    rows: Any = None if is_input else recipe.grad_output
    columns: Any = recipe.input_for_grad_weight if is_input else recipe.grad_output_for_grad_weight
    return (
        (is_along_columns(columns) if rows is None else is_pair(rows, columns))
        and not part.layout.batch
        and all(is_aligned(part, each) for each in (rows, columns) if each is not None)
        and inductor.is_fusible(part.local)
    )


def _noted(part: Plain, quantizer: Quantizer, steps: Steps, *, is_input: bool) -> Quantized:
    """Quantize step by step, in the memory layouts of `quantize_both`; mark the codes for the pass `fuse_noted`."""
    found = quantize_part(part, quantizer, steps)
    # the forward computes an input too; behind the barrier the backward computes it again, and does not keep it
    x = as_matrix(made_of_kept(part.local) if is_input else part.local)
    codes, scale = as_matrix(found.codes), found.scale.view(quantizer.scale_shape(x.shape))
    if is_along_columns(quantizer):
        codes = codes.t().contiguous().t()
    else:
        scale = scale.t().contiguous().t()
    codes, scale = noted_codes(codes, scale, x, quantizer)
    return replace(found, codes=codes.view(found.codes.shape), scale=scale.view(found.scale.shape))


inductor.register_joint_pass((noted_codes, noted_counts), fuse_noted)
_BOTH = inductor.once_with_more(quantize_both, quantize_both_counted)


def _both_directions(part: Plain, rows: Quantizer, columns: Quantizer, *, counts: bool) -> tuple[Quantized, Quantized]:
    codes, scale, column_codes, column_scale, *counted = _BOTH[counts](as_matrix(part.local), rows, columns)
    of_rows, of_columns = counted[0] if counted else (None, None)
    found = (codes, scale, rows, of_rows), (column_codes, column_scale, columns, of_columns)
    shape = part.local.shape
    first, second = (
        Quantized(
            codes=codes.view(shape),
            scale=scale.view(quantizer.scale_shape(shape)),
            quantizer=quantizer,
            layout=part.layout,
            counts=own,
        )
        for codes, scale, quantizer, own in found
    )
    return first, second


# ---------------------------------------------------------------------------------- four bits


def _has_packed_kernel(part: Plain, rows: Any, columns: Any) -> bool:
    """Whether one kernel quantizes ``part`` with ``rows`` and ``columns``, quantizers of packed four-bit codes."""
    sizes = part.local.shape
    return (
        is_packed_pair(rows, columns)
        and not part.cuts
        and len(sizes) == len(rows.block)
        and all(_compat.statically_true(size % GROUP == 0) and _compat.statically_true(size > 0) for size in sizes)
    )


_PACKED = inductor.once_with_more(quantize_two_levels, quantize_two_levels_counted)


@inductor.once_a_graph
def _outer_amaxes(x: Tensor, rows: Quantizer, columns: Quantizer) -> tuple[Tensor, ...]:
    if inductor.is_fusible(x):
        x = rounded(x).to(x.dtype)  # eager mode reads x rounded; a fused kernel would hold more digits
    return outer_amaxes(x, rows, columns)


def _both_packed(part: Plain, rows: Quantizer, columns: Quantizer, *, counts: bool) -> tuple[Quantized, Quantized]:
    codes, scale, outer, *others = _PACKED[counts](*_outer_amaxes(part.local, rows, columns), rows, columns)
    column_codes, column_scale, column_outer, *counted = others
    of_rows, of_columns = counted[0] if counted else (None, None)
    return (
        Quantized(codes=codes, scale=scale, quantizer=rows, outer_scale=outer, counts=of_rows),
        Quantized(
            codes=column_codes, scale=column_scale, quantizer=columns, outer_scale=column_outer, counts=of_columns
        ),
    )
