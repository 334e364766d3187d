"""Kernels that read a tensor once for two GEMMs, if no block of the tensor spans ranks.

    tensor                               what one read gives                                  kernel
    weight                               codes for the output, amaxes for grad_input's cast   `quantize_weight`
    stacked weights, square blocks       codes for the output, amaxes for grad_input's cast   `quantize_weight`
    stacked weights, rows and columns    codes for the output, amaxes for grad_input's cast   `group_quantize_rows`
    grad_output, FP8                     codes along rows and codes along tokens              `cast_transpose`
    weight, blocks along columns         codes for grad_input, in the backward                `quantize_columns`
    grad_output or x, four bits          codes along rows and codes along tokens              `quantize_two_levels`

"Rows and columns" is one scale for each row in the output, and one for each column in grad_input. Gradients that
Inductor computes, such as an activation's, are quantized step by step. Four bits need an earlier read for outer
amaxes.

Each of the two GEMMs calls the kernel with equal arguments, and a compiled graph keeps a single call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.cast_transpose import cast_transpose, is_pair
from fp8compile.ops.groups.group_quantize_rows import QUANTIZE_ROWS, is_row_pair
from fp8compile.ops.layer.quantize_over_ranks import is_aligned, quantize_part
from fp8compile.ops.outer_amaxes import outer_amaxes
from fp8compile.ops.quantization_steps import Steps
from fp8compile.ops.quantize_columns import is_along_columns, quantize_columns
from fp8compile.ops.quantize_two_levels import is_packed_pair, quantize_two_levels
from fp8compile.ops.quantize_weight import is_weight_pair, quantize_weight
from fp8compile.quantizers import GEMMS, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.quantizers.hadamard import GROUP

__all__ = ["ALONG_ROWS", "ALONG_TOKENS", "quantize_in_one_read"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ALONG_TOKENS = {GRAD_INPUT.a: GRAD_WEIGHT.a, OUTPUT.a: GRAD_WEIGHT.b}  # role along rows -> role along tokens
ALONG_ROWS = {columns: rows for rows, columns in ALONG_TOKENS.items()}


def quantize_in_one_read(part: Plain, role: str, recipe: Recipe, steps: Steps) -> Quantized:
    """Quantize ``part`` for the recipe's field ``role``, if possible by a kernel that reads it once for two GEMMs.

    If no kernel fits, ``steps`` quantize it.
    """
    quantizer = getattr(recipe, role)
    if role in (OUTPUT.b, GRAD_INPUT.b):
        return _weight(part, role, recipe, steps)
    row_role = ALONG_ROWS.get(role, role)
    rows, columns = getattr(recipe, row_role), getattr(recipe, ALONG_TOKENS[row_role])
    if row_role == GRAD_INPUT.a and _has_grad_kernel(part, rows, columns):
        return _both_directions(part, rows, columns)[role != row_role]
    if _has_packed_kernel(part, rows, columns):
        return _both_packed(part, rows, columns)[role != row_role]
    return quantize_part(part, quantizer, steps)


# ---------------------------------------------------------------------------------- weights

_quantize_weight = inductor.once_a_graph(quantize_weight)


def _weight(part: Plain, role: str, recipe: Recipe, steps: Steps) -> Quantized:
    first: Any = recipe.weight  # not None: this function is called only for products that are quantized
    again: Any = recipe.weight_for_grad_input
    is_first = role == OUTPUT.b
    quantizer = first if is_first else again
    if inductor.is_fusible(part.local) or not is_aligned(part, first):  # if fusible, its producer's kernel casts it
        return quantize_part(part, quantizer, steps)
    if part.layout.batch:
        return _matrices(part, quantizer, first, again, steps, is_first=is_first)
    if not is_first and is_along_columns(again) and is_aligned(part, again):
        return _along_columns(part, again)
    if not is_weight_pair(first, again, part.local.shape[1]):
        return quantize_part(part, quantizer, steps)
    codes, scale, amax = _quantize_weight(part.local, first, again)
    if is_first:
        return Quantized(codes=codes, scale=scale, quantizer=first, layout=part.layout)
    return quantize_part(part, again, steps, local_amax=amax)


def _matrices(
    part: Plain, quantizer: Quantizer, first: Quantizer, again: Any, steps: Steps, *, is_first: bool
) -> Quantized:
    """Quantize stacked weights for the output or for grad_input; if a kernel fits, one read serves both."""
    stack = part.local
    if is_pair(first, again) and not any(part.cuts) and not is_first:
        return _along_columns(part, again)
    matrix = stack.flatten(0, 1)
    if is_row_pair(first, again, matrix.shape[1]):
        codes, scale, amax = QUANTIZE_ROWS(matrix, _ends_of_matrices(stack), first, again)
    elif is_weight_pair(first, again, matrix.shape[1]):
        codes, scale, amax = _quantize_weight(matrix, first, again)
    else:
        return quantize_part(part, quantizer, steps)
    if is_first:
        scale = scale.view(stack.shape[0], *first.scale_shape(stack.shape[1:]))
        return Quantized(codes=codes.view(stack.shape), scale=scale, quantizer=first, layout=part.layout)
    amax = amax.view(stack.shape[0], *again.scale_shape(stack.shape[1:]))
    return quantize_part(part, again, steps, local_amax=amax)


_quantize_columns = inductor.once_a_graph(quantize_columns)


def _along_columns(part: Plain, quantizer: Quantizer) -> Quantized:
    """Quantize a weight or stacked weights for grad_input by one kernel, in the backward."""
    with inductor.left_in_backward():  # in the forward it would be kept: a byte for each element of all weights
        codes, scale = _quantize_columns(part.local, quantizer)
    return Quantized(codes=codes, scale=scale, quantizer=quantizer, layout=part.layout)


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


_cast_transpose = inductor.once_a_graph(cast_transpose)


def _both_directions(part: Plain, rows: Quantizer, columns: Quantizer) -> tuple[Quantized, Quantized]:
    codes, scale, column_codes, column_scale = _cast_transpose(as_matrix(part.local), rows, columns)
    found = (codes, scale, rows), (column_codes, column_scale, columns)
    shape = part.local.shape
    first, second = (
        Quantized(
            codes=codes.view(shape),
            scale=scale.view(quantizer.scale_shape(shape)),
            quantizer=quantizer,
            layout=part.layout,
        )
        for codes, scale, quantizer in found
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


_quantize_two_levels = inductor.once_a_graph(quantize_two_levels)


_outer_amaxes = inductor.once_a_graph(outer_amaxes)


def _both_packed(part: Plain, rows: Quantizer, columns: Quantizer) -> tuple[Quantized, Quantized]:
    amaxes = _outer_amaxes(part.local, rows, columns)
    codes, scale, outer, column_codes, column_scale, column_outer = _quantize_two_levels(
        part.local, amaxes[:1], amaxes[1:], rows, columns
    )
    return (
        Quantized(codes=codes, scale=scale, quantizer=rows, outer_scale=outer),
        Quantized(codes=column_codes, scale=column_scale, quantizer=columns, outer_scale=column_outer),
    )
