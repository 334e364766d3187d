"""fp8compile::group_quantize_two_levels: four-bit codes of groups of tokens as a GPU's grouped product reads them.

    along rows      codes (R, K / 2), two of a row a byte      scales in tiles of each group's rows
    along tokens    codes (K, C / 2), two of a column a byte   scales in tiles of each group's tokens

Both directions come from one read for the outer amaxes, one a group, and one for the codes. K is rounded up to a
multiple of 32, C is said by `fp8compile.ops.groups.tiles`; what is behind a group is zeros. On a GPU this op is two
Triton kernels; on a CPU, and as the reference, it is the steps of `group_two_levels`, laid out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.formats import pack
from fp8compile.ops.groups.tiles import tile_columns, tile_spans
from fp8compile.ops.groups.token_samples import tokens
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP
from fp8compile.scale_layouts import TILE_BLOCKS, TILE_ROWS, tiled
from fp8compile.target import target_of

__all__ = [
    "DIRECTIONS",
    "group_quantize_two_levels",
    "is_two_level_pair",
    "rows_of_two_levels",
    "tokens_of_two_levels",
]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
DIRECTIONS = ("both", "rows", "tokens")
ROW_BYTES = 16  # of codes, a multiple of which a row has


def rows_of_two_levels(quantizer: Quantizer | None) -> bool:
    """Whether the kernel makes its codes along rows."""
    return type(quantizer) is TwoLevelScaling and quantizer.block == (1, GROUP) and not quantizer.hadamard


def tokens_of_two_levels(quantizer: Quantizer | None) -> bool:
    """Whether the kernel makes its codes along tokens."""
    return type(quantizer) is TwoLevelScaling and quantizer.block == (GROUP, 1)


def is_two_level_pair(rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether the kernel makes codes of both at once: by one rule of scales."""
    return rows_of_two_levels(rows) and tokens_of_two_levels(columns) and rows.scale == columns.scale


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def _empty_outputs(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str) -> Outputs:
    (r, k), groups = x.shape, offsets.shape[0]
    width, row_bytes = tile_columns(r, groups), _up(k, 2 * ROW_BYTES) // 2
    blocks = _up(row_bytes * 2 // GROUP, TILE_BLOCKS)
    along_rows, along_tokens = directions != "tokens", directions != "rows"
    byte = {"dtype": torch.uint8}
    return (
        x.new_empty((r, row_bytes) if along_rows else (0, 0), **byte),
        x.new_empty((width, blocks) if along_rows else (0, 0), **byte),
        x.new_empty((groups,) if along_rows else (0,), dtype=torch.float32),
        x.new_empty((k, width // 2) if along_tokens else (0, 0), **byte),
        x.new_empty((_up(k, TILE_ROWS), width // GROUP) if along_tokens else (0, 0), **byte),
        x.new_empty((groups,) if along_tokens else (0,), dtype=torch.float32),
    )


def _quantized(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, one a byte, scales and outer scale of one group's tokens."""
    steps, quantizer = PYTHON_OF_STEPS, replace(quantizer, packed="none")
    amax = steps.amax(x, quantizer)
    multiplier, scale, outer = steps.two_scales(amax, steps.outer_amax(amax, quantizer), quantizer)
    return steps.cast(x, multiplier, quantizer), scale, outer


def _along_rows(x: Tensor, offsets: Tensor, quantizer: Quantizer, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    packed, tiles, outers = outputs
    flat, at = tiles.view(-1), 0
    for group, (rows, _) in enumerate(tile_spans(offsets)):
        codes, scale, outers[group] = _quantized(x[rows], quantizer)
        packed[rows] = pack(pad(codes, (0, packed.shape[1] * 2 - codes.shape[1])), 1)
        scale = pad(scale, (0, tiles.shape[1] - scale.shape[1]))
        size = _up(scale.shape[0], TILE_ROWS) * tiles.shape[1]
        flat[at : at + size] = tiled(scale).reshape(-1)
        at += size


def _along_tokens(x: Tensor, offsets: Tensor, quantizer: Quantizer, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    packed, tiles, outers = outputs
    flat = tiles.view(-1)
    for group, (rows, columns) in enumerate(tile_spans(offsets)):
        codes, scale, outers[group] = _quantized(x[rows], quantizer)
        wide, start = columns.stop - columns.start, columns.start
        packed[:, start // 2 : columns.stop // 2] = pack(pad(codes.t(), (0, wide - codes.shape[0])), 1)
        own = tiled(pad(scale.t(), (0, wide // GROUP - scale.shape[0]))).reshape(-1)
        flat[start // GROUP * tiles.shape[0] :][: own.numel()] = own


def _group_by_group(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str) -> Outputs:
    outputs = _empty_outputs(x, offsets, rows, columns, directions)
    for each in outputs:
        each.zero_()
    if directions != "tokens":
        _along_rows(x, offsets, rows, outputs[:3])
    if directions != "rows":
        _along_tokens(x, offsets, columns, outputs[3:])
    return outputs


def _check(rows: Quantizer, columns: Quantizer, directions: str) -> None:
    allowed = {
        "both": is_two_level_pair(rows, columns),
        "rows": rows_of_two_levels(rows),
        "tokens": tokens_of_two_levels(columns),
    }
    if not allowed.get(directions):
        raise ValueError(
            f"fp8compile::group_quantize_two_levels: quantizers are {rows!r} and {columns!r} for directions "
            f"{directions!r}. It is 'rows', 'tokens' or 'both', of a TwoLevelScaling with block (1, 16) and no "
            "transform along rows, one with block (16, 1) along tokens, and for both at once with the same rule of "
            "scales. Choose them as fp8compile.recipes.nvfp4() does."
        )


def _words(codes: Tensor) -> Tensor:
    """Sixteen codes a number, as the kernel writes them."""
    return codes.view(torch.int64) if codes.numel() else codes


def _kernel(
    x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales in tiles and outer scales along rows, then those along tokens.

    Args:
        x: (R, K), sorted by group; rows behind the last group are not read.
        offsets: Ends of the groups, (E,) int32.
        rows: Block (1, 16), no transform.
        columns: Block (16, 1).
        directions: ``"both"``, ``"rows"`` or ``"tokens"``; results of a direction that is left out have no elements.
    """
    _check(rows, columns, directions)
    if target_of(x.device).type == "cpu":
        return _group_by_group(x, offsets, rows, columns, directions)
    outputs = _empty_outputs(x, offsets, rows, columns, directions)
    if not offsets.shape[0] or not x.shape[1]:
        for each in outputs:
            each.zero_()
        return outputs
    from fp8compile.kernels.groups_two_levels import groups_two_levels

    amaxes = torch.zeros((2, offsets.shape[0]), dtype=torch.int32, device=x.device)
    codes, scale, outer, column_codes, *others = outputs
    contiguous = _words(codes), scale, outer, _words(column_codes), *others
    wanted = rows if directions != "tokens" else None, columns if directions != "rows" else None
    groups_two_levels(x, offsets.contiguous(), *wanted, amaxes, contiguous)
    return outputs


def _samples() -> Iterator[tuple]:
    noisy = {"rounding": "stochastic", "seed": 3}
    line, pillar = TwoLevelScaling(**noisy), TwoLevelScaling(block=(GROUP, 1), packed="columns")
    for number, (x, offsets) in enumerate(tokens()):
        transformed = replace(pillar, hadamard=(1, -1) * 8, **noisy)
        yield x, offsets, line, transformed, DIRECTIONS[number % 3]
        yield x, offsets, *(replace(each, scale="torchao") for each in (line, pillar)), "both"


group_quantize_two_levels = register_op(
    "fp8compile::group_quantize_two_levels",
    _kernel,
    fake=_empty_outputs,
    backward=None,
    decompose=None,  # on a CPU the loop over groups reads the offsets
    sharding=None,  # groups are whole on a rank
    samples=_samples,
)
_compat.register_fallback(group_quantize_two_levels)
