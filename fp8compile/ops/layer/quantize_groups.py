"""Quantize rows that are sorted by group; each group gets the codes that it would get alone.

Codes along rows are (R, K) for R rows of K features; a tensorwise quantizer gives each group one scale. Codes along
tokens are (K, C), in the layout of `fp8compile.ops.groups.padding`, with C tokens after padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fp8compile import inductor
from fp8compile.formats import unpack
from fp8compile.layout.cuts import Sharding, axis_blocks
from fp8compile.layout.four_bit_packing import packed_dim
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.groups.four_bit_tiles import scales_of_rows
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.group_cast import group_cast
from fp8compile.ops.groups.group_cast_transpose import group_cast_transpose, is_group_pair
from fp8compile.ops.groups.group_outer_amaxes import is_two_level_pair
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.group_quantize_rows import QUANTIZE_ROWS, is_row_pair
from fp8compile.ops.groups.group_quantize_two_levels import quantize_groups_in_two_levels
from fp8compile.ops.groups.group_two_levels import group_two_levels
from fp8compile.ops.groups.padding import group_to_read
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.ops.quantization_steps import Steps
from fp8compile.ops.rounding_barrier import optimization_barrier
from fp8compile.quantizers import Quantizer, TwoLevelScaling, with_block
from fp8compile.target import target_of

__all__ = ["as_values_of_rows", "by_row", "cast_rows", "is_four_bits_on_gpu", "quantize_groups"]

_group_cast_transpose = inductor.once_a_graph(group_cast_transpose)
_group_cast = inductor.once_a_graph(group_cast)
_optimization_barrier = inductor.once_a_graph(optimization_barrier)
_group_amax = inductor.once_a_graph(group_amax)


def by_row(quantizer: Quantizer) -> Quantizer:
    """Return a quantizer with one scale for each row instead of one for each group, as grouped GEMMs read scales."""
    return quantizer if quantizer.block[0] == 1 else with_block(quantizer, (1, -1))


def quantize_groups(
    part: Plain,
    rows: Any,
    tokens: Any,
    steps: Steps,
    *,
    along_tokens: bool,
    reads_once: bool,
    is_input: bool = False,
) -> Quantized:
    """Quantize rows that are sorted by group, along rows or along tokens.

    Args:
        part: Rows (R, K); the layout has the ends of the groups.
        rows: Quantizer along rows of one group; may be None if ``along_tokens``.
        tokens: Quantizer along tokens of one group; may be None if not ``along_tokens``.
        steps: The functions for amax, scale and cast.
        along_tokens: Whether to quantize along tokens instead of along rows.
        reads_once: Whether one kernel may quantize along rows and along tokens, in compiled code on a GPU. The forward
            then saves the codes along tokens in place of the rows.
        is_input: Whether the rows are a layer's input, which the backward may recompute from kept tensors.
    """
    quantizer = tokens if along_tokens else rows
    reads_once = reads_once and not any(part.cuts)
    if quantizer.has_outer_scale():
        return _in_two_levels(part, rows, tokens, along_tokens=along_tokens, reads_once=reads_once)
    x = part.local
    offs: Any = part.layout.offs  # rows are in groups
    if reads_once and is_group_pair(rows, tokens):
        found = _group_cast_transpose(x, offs, rows, tokens)
        codes, scale = found[2:] if along_tokens else found[:2]
    elif along_tokens:
        codes, scale = _tokens(part, rows, tokens, steps, reads_once=reads_once, is_input=is_input)
    elif reads_once and is_row_pair(rows, tokens, x.shape[1]):
        codes, scale, _ = QUANTIZE_ROWS(x, offs, rows, tokens)
    elif rows.block[0] == 1:
        return quantize_part(part, rows, steps)
    else:
        codes, scale = cast_rows(x, offs, rows, steps, lambda amaxes: _over_ranks(amaxes, part, rows))
    return Quantized(codes=codes, scale=scale, quantizer=quantizer, layout=part.layout)


def cast_rows(
    x: Tensor, offs: Tensor, quantizer: Quantizer, steps: Steps, over_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Cast rows with one scale for each group; returns codes (R, K), and the scale for each row, (R, 1).

    ``over_ranks`` reduces this rank's amaxes over all ranks that have rows of the groups.
    """
    multiplier, scale = steps.scale(over_ranks(_group_amax(x, offs, quantizer)), quantizer)
    group = group_to_read(offs, x.shape[0])
    return steps.cast(x, multiplier[group], by_row(quantizer)), scale[group]


def _tokens(
    part: Plain,
    rows: Quantizer | None,
    tokens: Quantizer,
    steps: Steps,
    *,
    reads_once: bool,
    is_input: bool,
) -> tuple[Tensor, Tensor]:
    """Quantize groups along tokens; returns codes and scales."""
    x: Tensor = part.local
    offs: Any = part.layout.offs  # rows are in groups
    if tokens.block[0] != -1:
        codes, scale = group_quantize(x, offs, tokens)
        return codes, scale
    if reads_once and is_row_pair(rows, tokens, x.shape[1]):
        amaxes = QUANTIZE_ROWS(x, offs, rows, tokens)[2]
        x = _optimization_barrier(x) if is_input else x  # without it, the forward makes the codes and keeps them
    else:
        amaxes = _amaxes_along_tokens(x, offs, part.cuts, tokens)
    multiplier, scale = _scales_along_tokens(amaxes, tokens, steps.scale)
    return _group_cast(x, offs, multiplier, tokens), scale


# A step that is read calls them for the product and to observe it, and one cast serves both.
@inductor.once_a_graph
def _amaxes_along_tokens(x: Tensor, offs: Tensor, cuts: Sharding, quantizer: Quantizer) -> Tensor:
    part = Plain(x, TensorLayout(cuts, offs=offs))
    return _over_ranks(_group_amax(x, offs, quantizer), part, quantizer)


@inductor.once_a_graph
def _scales_along_tokens(
    amaxes: Tensor, quantizer: Quantizer, scale: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    return scale(amaxes, quantizer)


def _over_ranks(amaxes: Tensor, part: Plain, quantizer: Quantizer) -> Tensor:
    """Return amaxes of groups, reduced over ranks whose features share blocks; unchanged if no block spans ranks."""
    columns = axis_blocks(part.local.shape, part.cuts, quantizer.block)[1]
    for group in columns.groups if columns.kind == "spanning" else ():
        amaxes = all_reduce_amax(amaxes, group)
    return amaxes


# ---------------------------------------------------------------------------------- two levels of scales


def is_four_bits_on_gpu(x: Tensor, quantizer: Quantizer) -> bool:
    """Whether a GPU stores these codes in pairs and their scales in tiles, for a four-bit grouped GEMM."""
    return type(quantizer) is TwoLevelScaling and target_of(x.device).type == "cuda"


def _in_two_levels(part: Plain, rows: Any, tokens: Any, *, along_tokens: bool, reads_once: bool) -> Quantized:
    x, quantizer = part.local, tokens if along_tokens else rows
    offs: Any = part.layout.offs  # rows are in groups
    if not is_four_bits_on_gpu(x, quantizer):
        quantizer = quantizer.unpacked()
        codes, scale, outer = group_two_levels(x, offs, quantizer, along_tokens)
    else:
        how = quantizer, quantizer, "tokens" if along_tokens else "rows"
        if reads_once and is_two_level_pair(rows, tokens):
            how = rows, tokens, "both"
        found = quantize_groups_in_two_levels(x, offs, *how)
        codes, scale, outer = found[3:] if along_tokens else found[:3]
        quantizer = replace(quantizer, packed="columns" if along_tokens else "rows")
    return Quantized(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer, layout=part.layout)


def as_values_of_rows(found: Quantized, features: int) -> Quantized:
    """Convert codes along rows to one code a byte, with scales not in tiles, for `dequantized`."""
    quantizer = by_row(found.quantizer)
    if packed_dim(quantizer) is None:
        return replace(found, quantizer=quantizer)
    codes, blocks = unpack(found.codes, -1)[:, :features], -(-features // quantizer.block[1])
    offs: Any = found.layout.offs  # rows are in groups
    scale = scales_of_rows(found.scale, offs, codes.shape[0], blocks)
    return replace(found, codes=codes, scale=scale, quantizer=quantizer.unpacked() or quantizer)
