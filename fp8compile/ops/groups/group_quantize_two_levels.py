"""fp8compile::group_quantize_two_levels: four-bit codes of groups of tokens, for grouped GEMMs.

    along rows      codes (R, K / 2), two codes of a row in a byte         scales in tiles of each group's rows
    along tokens    codes (K, C / 2), two codes of a feature in a byte     scales in tiles of each group's tokens

R is the number of tokens, C the number with padding (`fp8compile.ops.groups.four_bit_tiles`), and K the number of
features, which is rounded up to a multiple of 32 along rows. On a GPU this op is one Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile._compat import OpOverload, guard_or_false
from fp8compile.formats import pack
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.four_bit_tiles import tile_columns, tile_spans
from fp8compile.ops.groups.group_outer_amaxes import (
    check_directions,
    group_outer_amaxes,
    quantizers_of,
)
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantize_two_levels import by_outer_amax
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS, tiled

__all__ = ["group_quantize_two_levels", "quantize_groups_in_two_levels"]

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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return four-bit codes, scales in 128 x 4 tiles and outer scales along rows, then the same three along tokens.

    ``amaxes`` is the result of `group_outer_amaxes`. ``directions`` is ``"both"``, ``"rows"`` or ``"tokens"``; the
    three results of an excluded direction are empty. Rows after the last group are not read.
    """
    outputs = _empty_outputs(x, offsets, amaxes, rows, columns, directions)
    for each in outputs:
        each.zero_()
    if directions != "tokens":
        _along_rows(x, offsets, amaxes[0], rows, outputs[:3])
    if directions != "rows":
        _along_tokens(x, offsets, amaxes[1], columns, outputs[3:])
    return outputs


def _launch(
    results: tuple[Tensor, ...], x: Tensor, offsets: Tensor, amaxes: Tensor, rows: Quantizer, columns: Quantizer,
    directions: str,
) -> Any:  # fmt: skip
    if not offsets.shape[0] or guard_or_false(x.shape[1] == 0):
        return None
    from fp8compile.kernels.group_quantize_two_levels import codes_of_groups

    return codes_of_groups(x, offsets, amaxes, *quantizers_of(rows, columns, directions), results)


group_quantize_two_levels: OpOverload = register_group_op(
    "fp8compile::group_quantize_two_levels",
    _group_by_group,
    fake=_empty_outputs,
    portable=ON_GPU,
    launch=_launch,
)


_OUTER_AMAXES = inductor.once_a_graph(group_outer_amaxes)
_CODES = inductor.once_a_graph(group_quantize_two_levels)


def quantize_groups_in_two_levels(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> tuple[Tensor, ...]:
    """Run `group_outer_amaxes`, then `group_quantize_two_levels`.

    The forward and the backward of a graph share one call.
    """
    amaxes = _OUTER_AMAXES(x, offsets, rows, columns, directions)
    found: tuple[Tensor, ...] = _CODES(x, offsets, amaxes, rows, columns, directions)
    return found
