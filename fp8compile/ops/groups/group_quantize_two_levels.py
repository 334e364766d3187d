"""fp8compile::group_quantize_two_levels: four-bit codes of groups of tokens, for grouped GEMMs.

    along rows      codes (R, K / 2), two codes of a row in a byte         scales in tiles of each group's rows
    along tokens    codes (K, C / 2), two codes of a feature in a byte     scales in tiles of each group's tokens

R is the number of tokens, C the number with padding (`fp8compile.ops.groups.four_bit_tiles`), and K the number of
features, which is rounded up to a multiple of 32 along rows. On a GPU this op is one Triton kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile.formats import pack
from fp8compile.ops.counting_kernels import no_counts_of_groups
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.four_bit_tiles import tile_columns, tile_spans
from fp8compile.ops.groups.group_outer_amaxes import (
    check_directions,
    group_outer_amaxes,
    quantizers_of,
    two_level_samples,
)
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantize_two_levels import by_outer_amax, counts_of_direction
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS, tiled
from fp8compile.target import target_of

__all__ = ["group_quantize_two_levels", "group_quantize_two_levels_counted", "quantize_groups_in_two_levels"]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
ROW_BYTES = 16  # a row of codes is a multiple of this many bytes


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def _empty_outputs(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> Outputs:
    check_directions("group_quantize_two_levels", rows, columns, directions)
    (r, k), groups = x.shape, offsets.shape[0]
    width, row_bytes = tile_columns(r, groups), _up(k, 2 * ROW_BYTES) // 2
    blocks = _up(row_bytes * 2 // GROUP, TILE_BLOCKS)
    along_rows, along_tokens = directions != "tokens", directions != "rows"
    byte: dict[str, Any] = {"dtype": torch.uint8}
    return (
        x.new_empty((r, row_bytes) if along_rows else (0, 0), **byte),
        x.new_empty((width, blocks) if along_rows else (0, 0), **byte),
        x.new_empty((groups,) if along_rows else (0,), dtype=torch.float32),
        x.new_empty((k, width // 2) if along_tokens else (0, 0), **byte),
        x.new_empty((_up(k, TILE_ROWS), width // GROUP) if along_tokens else (0, 0), **byte),
        x.new_empty((groups,) if along_tokens else (0,), dtype=torch.float32),
    )


def _quantized(x: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Return one group's codes (one per byte), scales of blocks and outer scale."""
    return by_outer_amax(x, outer_amax, quantizer.unpacked() or quantizer)


def _along_rows(
    x: Tensor, offsets: Tensor, amaxes: Tensor, quantizer: Quantizer, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    packed, tiles, outers = outputs
    flat, at = tiles.view(-1), 0
    for group, (rows, _) in enumerate(tile_spans(offsets)):
        codes, scale, outers[group] = _quantized(x[rows], amaxes[group : group + 1], quantizer)
        packed[rows] = pack(pad(codes, (0, packed.shape[1] * 2 - codes.shape[1])), 1)
        scale = pad(scale, (0, tiles.shape[1] - scale.shape[1]))
        size = _up(scale.shape[0], TILE_ROWS) * tiles.shape[1]
        flat[at : at + size] = tiled(scale).reshape(-1)
        at += size


def _along_tokens(
    x: Tensor, offsets: Tensor, amaxes: Tensor, quantizer: Quantizer, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    packed, tiles, outers = outputs
    flat = tiles.view(-1)
    for group, (rows, columns) in enumerate(tile_spans(offsets)):
        codes, scale, outers[group] = _quantized(x[rows], amaxes[group : group + 1], quantizer)
        wide, start = columns.stop - columns.start, columns.start
        packed[:, start // 2 : columns.stop // 2] = pack(pad(codes.t(), (0, wide - codes.shape[0])), 1)
        own = tiled(pad(scale.t(), (0, wide // GROUP - scale.shape[0]))).reshape(-1)
        flat[start // GROUP * tiles.shape[0] :][: own.numel()] = own


def _group_by_group(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> Outputs:
    outputs = _empty_outputs(x, offsets, amaxes, rows, columns, directions)
    for each in outputs:
        each.zero_()
    if directions != "tokens":
        _along_rows(x, offsets, amaxes[0], rows, outputs[:3])
    if directions != "rows":
        _along_tokens(x, offsets, amaxes[1], columns, outputs[3:])
    return outputs


def _words(codes: Tensor) -> Tensor:
    """View packed four-bit codes as int64 with sixteen codes each, which is how the kernel writes them."""
    return codes.view(torch.int64) if codes.numel() else codes


def _launched(
    x: Tensor,
    offsets: Tensor,
    amaxes: Tensor,
    rows: Quantizer,
    columns: Quantizer,
    directions: str,
    counts: Tensor | None = None,
) -> Outputs:
    outputs = _empty_outputs(x, offsets, amaxes, rows, columns, directions)
    if not offsets.shape[0] or not x.shape[1]:
        for each in outputs:
            each.zero_()
        return outputs
    from fp8compile.kernels.group_quantize_two_levels import codes_of_groups

    codes, scale, outer, column_codes, *others = outputs
    contiguous = _words(codes), scale, outer, _words(column_codes), *others
    wanted = quantizers_of(rows, columns, directions)
    codes_of_groups(x, offsets.contiguous(), amaxes.contiguous(), *wanted, contiguous, counts)
    return outputs


def _kernel(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return four-bit codes, scales in 128 x 4 tiles and outer scales along rows, then the same three along tokens.

    ``amaxes`` is the result of `group_outer_amaxes`. ``directions`` is ``"both"``, ``"rows"`` or ``"tokens"``; the
    three results of an excluded direction are empty. Rows after the last group are not read.
    """
    how = x, offsets, amaxes, rows, columns, directions
    return _group_by_group(*how) if target_of(x.device).type == "cpu" else _launched(*how)


# ---------------------------------------------------------------------------------- with counts


def _counted_fake(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _empty_outputs(x, offsets, amaxes, rows, columns, directions)
    return *outputs, no_counts_of_groups(offsets, 2)


def _counts(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> Tensor:
    """Compute the statistics of E groups on a CPU, int64 (2, 3, E): along rows, then along tokens."""
    counts = no_counts_of_groups(offsets, 2)
    for group, (own, _) in enumerate(tile_spans(offsets)):
        tokens = x[own]
        filled = pad(tokens, (0, 0, 0, -len(tokens) % GROUP)) if columns.transform() else tokens
        for direction, (values, quantizer) in enumerate(((tokens, rows), (filled, columns))):
            if directions in ("both", ("rows", "tokens")[direction]):
                found = _quantized(values, amaxes[direction, group : group + 1], quantizer)
                counts[direction, :, group] = counts_of_direction(values, found, quantizer.unpacked() or quantizer)
    return counts


def _counted_kernel(
    x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `group_quantize_two_levels` and count statistics of E groups (`fp8compile.ops.counting_kernels`)."""
    how = x, offsets, amaxes, rows, columns, directions
    if target_of(x.device).type == "cpu":
        return *_group_by_group(*how), _counts(*how)
    counts = no_counts_of_groups(offsets, 2)
    return *_launched(*how, counts), counts


def _samples() -> Iterator[tuple[Any, ...]]:
    for x, offsets, *how in two_level_samples():
        yield x, offsets, group_outer_amaxes(x, offsets, *how), *how


group_quantize_two_levels: OpOverload = register_group_op(
    "fp8compile::group_quantize_two_levels", _kernel, fake=_empty_outputs, portable=ON_GPU, samples=_samples
)


group_quantize_two_levels_counted: OpOverload = register_group_op(
    "fp8compile::group_quantize_two_levels_counted",
    _counted_kernel,
    fake=_counted_fake,
    portable=ON_GPU,
    samples=_samples,
)
_OUTER_AMAXES = inductor.once_a_graph(group_outer_amaxes)
_CODES = inductor.once_with_more(group_quantize_two_levels, group_quantize_two_levels_counted)


def quantize_groups_in_two_levels(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str, *, counts: bool = False
) -> tuple[Tensor, ...]:
    """Run `group_outer_amaxes`, then `group_quantize_two_levels`; with ``counts``, also return statistics of groups.

    The forward and the backward of a graph share one call.
    """
    amaxes = _OUTER_AMAXES(x, offsets, rows, columns, directions)
    found: tuple[Tensor, ...] = _CODES[counts](x, offsets, amaxes, rows, columns, directions)
    return found
