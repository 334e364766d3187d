"""Sample arguments of the ops that multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import pack
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.grouped.grouped_blockwise_mm import BLOCK
from fp8compile.ops.groups.four_bit_tiles import tile_ends
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.group_quantize_two_levels import quantize_groups_in_two_levels
from fp8compile.ops.groups.padding import TOKEN_ALIGNMENT, padded_length
from fp8compile.ops.nvfp4_mm import NV_BLOCK
from fp8compile.quantizers import GEMMS, CurrentScaling, GemmConfig, Quantizer, TwoLevelScaling
from fp8compile.scale_layouts import TILE_ROWS, tiled, tiles_numel
from fp8compile.testing.samples import inputs
from fp8compile.testing.samples.inputs import tokens

__all__ = ["SAMPLES"]


def _operand(x: Tensor, quantizer: Quantizer) -> Quantized:
    multiplier = quantizer.multiplier(quantizer.amax(x))
    return Quantized(codes=quantizer.cast(x, multiplier), scale=quantizer.scale_of(multiplier), quantizer=quantizer)


def _grouped_blockwise_mm() -> Iterator[tuple[Any, ...]]:
    line, tile, pillar = (CurrentScaling(block=block) for block in ((1, BLOCK), (BLOCK, BLOCK), (BLOCK, 1)))
    for x, offsets in tokens():
        rows, k = x.shape
        matrices, scale = torch.randint(0, 120, (offsets.shape[0], 20, k), dtype=torch.uint8), torch.rand(rows, 1)
        of_matrices = torch.rand(offsets.shape[0], *tile.scale_shape((20, k)))
        codes = line.cast(x, line.multiplier(line.amax(x))).contiguous()
        yield codes, matrices, scale, of_matrices, offsets, "e4m3", "e5m2", torch.bfloat16
        again = torch.randint(0, 120, (offsets.shape[0], 20, k), dtype=torch.uint8)
        yield codes, again, scale, torch.rand(offsets.shape[0], 20, 1), offsets, "e4m3", "e4m3", torch.float32
        codes, scale = group_quantize(x, offsets, pillar)
        yield codes, codes[: k // 2], scale, scale[:, : k // 2], offsets, "e4m3", "e4m3", torch.bfloat16
        groups, whole = offsets.shape[0], ("e5m2", "e4m3", torch.bfloat16, -1)
        codes = torch.randint(0, 120, (rows, k), dtype=torch.uint8)
        yield codes, matrices, torch.rand(rows, 1), torch.rand(groups, 20, 1), offsets, *whole
        columns = padded_length(rows, groups, TOKEN_ALIGNMENT)
        codes = torch.randint(0, 120, (k, columns), dtype=torch.uint8)
        yield codes, codes[:8], torch.rand(groups, k), torch.rand(groups, 1), offsets, *whole


def _grouped_mm() -> Iterator[tuple[Any, ...]]:
    for offsets in inputs.offsets_of_groups():
        for dtype in (torch.bfloat16, torch.float32):
            a = torch.randn(12, 24).to(dtype)
            a[int(offsets[-1]) :] = torch.nan
            yield a, torch.randn(3, 20, 24).to(dtype), offsets, GemmConfig()
            yield a, torch.randn(12, 21).to(dtype), offsets, GemmConfig()
    yield torch.randn(24, 12).t(), torch.randn(3, 24, 20).transpose(1, 2), offsets + 12, GemmConfig()
    yield a[:0], torch.randn(3, 20, 24), offsets, GemmConfig()  # the last offsets: all groups are empty


def _group_sum() -> Iterator[tuple[Any, ...]]:
    for a, b, offsets, config in _grouped_mm():
        if b.ndim == 3:
            yield a, offsets, config


def _grouped_nvfp4_mm() -> Iterator[tuple[Any, ...]]:
    line, pillar = TwoLevelScaling(), TwoLevelScaling(block=(NV_BLOCK, 1), packed="columns")
    generator = torch.Generator().manual_seed(0)
    for x, offsets in tokens():
        codes, scale, outer, *turned = quantize_groups_in_two_levels(x, offsets, line, pillar, "both")
        groups, (features, row_bytes) = offsets.shape[0], (16, codes.shape[1])
        matrices = torch.randint(256, (groups, row_bytes, features), generator=generator, dtype=torch.uint8)
        size = tiles_numel(features, row_bytes * 2 // NV_BLOCK)
        scales = torch.randint(120, (groups, size), generator=generator, dtype=torch.uint8)
        yield codes, matrices.transpose(1, 2), scale, scales, outer, torch.rand(groups), offsets, torch.bfloat16
        half = features // 2  # codes of fewer rows than their tiles have
        of_half = turned[0][:half], turned[1][:TILE_ROWS]
        yield of_half[0], turned[0], of_half[1], turned[1], turned[2], turned[2], tile_ends(offsets), torch.float32


def _scaled_grouped_mm() -> Iterator[tuple[Any, ...]]:
    last = torch.bfloat16, GemmConfig()
    for offsets in inputs.offsets_of_groups():
        for block_a, block_b in ((1, -1), (1, -1)), ((1, 16), (16, 16)), ((-1, -1), (-1, -1)):
            of_a, of_b = CurrentScaling(block=block_a), CurrentScaling(block=block_b)
            a = _operand(torch.randn(12, 24), CurrentScaling(block=(1, block_a[1])))
            b = [_operand(each, of_b) for each in torch.randn(3, 20, 24)]
            codes, scales = (torch.stack([getattr(each, name) for each in b]) for name in ("codes", "scale"))
            yield a.codes, codes, a.scale, scales, offsets, of_a, of_b, *last
        columns, of_tokens = padded_length(12, 3, 16), CurrentScaling(block=(-1, 1))
        x, y = (torch.randint(0, 120, (features, columns), dtype=torch.uint8) for features in (20, 24))
        yield x, y, torch.rand(3, 20), torch.rand(3, 24), offsets, of_tokens, of_tokens, *last
    row, weight = CurrentScaling(block=(1, -1)), torch.zeros(3, 20, 24, dtype=torch.uint8)
    no_rows = torch.empty(0, 24, dtype=torch.uint8), weight, torch.empty(0, 1), torch.ones(3, 20, 1)
    yield *no_rows, offsets, row, row, *last  # the last offsets: all groups are empty
    turned = torch.randint(0, 120, (24, 12), dtype=torch.uint8).t()
    yield (
        turned,
        weight.transpose(1, 2).contiguous().transpose(1, 2),
        torch.ones(12, 1),
        no_rows[3],
        offsets,
        row,
        row,
        *last,
    )


def _scaled_mm() -> Iterator[tuple[Any, ...]]:
    for m, k, n, dtype in ((17, 24, 40, torch.bfloat16), (1, 32, 16, torch.float32), (0, 16, 16, torch.bfloat16)):
        for recipe in inputs.recipes():
            quantizers: Any = recipe.quantizers(GEMMS[0])
            a_quantizer, b_quantizer = quantizers
            a = _operand(torch.randn(m, k), a_quantizer)
            b = _operand(torch.randn(n, k), b_quantizer).t()
            yield a.codes, b.codes, a.scale, b.scale, a.quantizer, b.quantizer, dtype, GemmConfig(), None, None


def _nvfp4_mm() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for m, k, n, dtype in ((16, 32, 32, torch.bfloat16), (144, 96, 16, torch.float32), (0, 32, 16, torch.bfloat16)):
        sizes = [(16, (rows, k)) for rows in (m, n)] + [(120, (rows, k // NV_BLOCK)) for rows in (m, n)]
        made = [torch.randint(top, size, generator=generator, dtype=torch.uint8) for top, size in sizes]
        codes, scales = made[:2], made[2:]
        outer = torch.tensor([0.37]), torch.tensor([1.9])
        packed = [pack(each, 1) for each in codes]
        if m == 144:
            packed[0] = packed[0].t().contiguous().t()  # strides may be any
        yield *packed, *(tiled(each).reshape(-1) for each in scales), *outer, dtype


SAMPLES = {
    "fp8compile::grouped_blockwise_mm": _grouped_blockwise_mm,
    "fp8compile::grouped_mm": _grouped_mm,
    "fp8compile::group_sum": _group_sum,
    "fp8compile::grouped_nvfp4_mm": _grouped_nvfp4_mm,
    "fp8compile::scaled_grouped_mm": _scaled_grouped_mm,
    "fp8compile::scaled_mm": _scaled_mm,
    "fp8compile::nvfp4_mm": _nvfp4_mm,
}
