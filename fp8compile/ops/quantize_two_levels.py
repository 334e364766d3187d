"""fp8compile::quantize_two_levels: four-bit codes of a matrix along rows and columns, by one read.

The NVFP4 version of `fp8compile.ops.quantize_both`. Outer amaxes are arguments, because they must be known before the
first code is computed (`fp8compile.ops.outer_amaxes`). Scales are in tiles, the layout that a GPU's GEMM reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import _compat, inductor
from fp8compile.kernels.programs import packed_programs
from fp8compile.ops.counting_kernels import counts_of, counts_of_steps, empty_counts
from fp8compile.ops.registry import register_kernel_op
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.blocks import expand_blocks
from fp8compile.quantizers.hadamard import GROUP, random_hadamard
from fp8compile.scale_layouts import tiled, tiles_numel
from fp8compile.target import target_of

__all__ = [
    "by_outer_amax",
    "counts_of_direction",
    "is_packed_pair",
    "quantize_two_levels",
    "quantize_two_levels_counted",
]

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def is_packed_pair(rows: Quantizer | None, columns: Quantizer | None) -> bool:
    """Whether the GPU kernel can quantize by ``rows`` and by ``columns`` in one read.

    The kernel takes packed `TwoLevelScaling` with the same rule of scales and blocks (1, 16) and (16, 1), without a
    transform along rows.
    """
    if type(rows) is not TwoLevelScaling or type(columns) is not TwoLevelScaling:
        return False
    if (rows.packed, columns.packed) != ("rows", "columns") or rows.scale != columns.scale or not rows.has_kernels():
        return False
    return (rows.block, columns.block) == ((1, GROUP), (GROUP, 1)) and not rows.hadamard


def _empty_outputs(x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer) -> Outputs:
    m, k = x.shape
    return (
        x.new_empty((m, k // 2), dtype=torch.uint8),
        x.new_empty((tiles_numel(m, k // GROUP),), dtype=torch.uint8),
        torch.empty_like(row_amax),
        x.new_empty((k, m // 2), dtype=torch.uint8).t(),
        x.new_empty((tiles_numel(k, m // GROUP),), dtype=torch.uint8),
        torch.empty_like(column_amax),
    )


def by_outer_amax(x: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix by a known outer amax; return codes, scales of blocks and the outer scale.

    ``outer_amax`` is the amax of the whole matrix after the quantizer's transform, (1,) float32.
    """
    outer = quantizer.outer_scale(outer_amax)
    scale = quantizer.block_scale(quantizer.amax(x), outer_amax)
    return quantizer.cast(x, quantizer.block_multiplier(scale, outer)), scale, outer


def _direction(x: Tensor, outer_amax: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, outer = by_outer_amax(x, outer_amax, quantizer)
    along_rows = scale if quantizer.block[0] == 1 else scale.t()
    return codes, tiled(along_rows).reshape(-1), outer


def _step_by_step(x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer) -> Outputs:
    codes, scale, outer = _direction(x, row_amax, rows)
    column_codes, column_scale, column_outer = _direction(x, column_amax, columns)
    return codes.contiguous(), scale, outer, column_codes.t().contiguous().t(), column_scale, column_outer


def _launch(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Any, columns: Any, counts: Tensor | None
) -> Outputs:
    from fp8compile.kernels.quantize_two_levels import both_packed

    outputs = _empty_outputs(x, row_amax, column_amax, rows, columns)
    codes, scale, outer, column_codes, *others = outputs
    contiguous = codes.view(torch.int64), scale, outer, column_codes.t().view(torch.int64), *others
    both_packed(x.contiguous(), (row_amax, column_amax), rows, columns, contiguous, counts)
    return outputs


def _has_no_launch(x: Tensor) -> bool:
    return target_of(x.device).type == "cpu" or _compat.guard_or_false(x.numel() == 0)


def _kernel(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales in 128 x 4 tiles and the outer scale along rows, then the same along columns.

    ``x`` is (M, K), both multiples of 16. ``row_amax`` and ``column_amax`` are the whole matrix's amaxes for codes
    along rows and along columns, (1,) float32. Codes along columns are column-major.
    """
    given = x, row_amax, column_amax, rows, columns
    return _step_by_step(*given) if _has_no_launch(x) else _launch(*given, None)


# ---------------------------------------------------------------------------------- with counts


def _programs(x: Tensor) -> int:
    return math.prod(packed_programs(x.shape))


def _counted_fake(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_empty_outputs(x, row_amax, column_amax, rows, columns), empty_counts(x, 2, _programs(x))


def counts_of_direction(x: Tensor, outer_amax: Tensor, quantizer: Any) -> Tensor:
    """Cast ``x`` by a known outer amax; return the cast's amax (as bits), underflows and saturations, (3,) int32."""
    own = quantizer.unpacked()
    codes, scale, outer = by_outer_amax(x, outer_amax, own)
    values = random_hadamard(x.float(), 0, own.transform()) if own.transform() else x
    scales = expand_blocks(own.scale_values(scale), codes.shape, own.block)
    return counts_of(values, codes, scales * outer, own.element_format())


def _counted_steps(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    each = (row_amax, rows), (column_amax, columns)
    counts = counts_of_steps([counts_of_direction(x, *own) for own in each], _programs(x))
    return *_step_by_step(x, row_amax, column_amax, rows, columns), counts


def _counted_kernel(
    x: Tensor, row_amax: Tensor, column_amax: Tensor, rows: Quantizer, columns: Quantizer
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = x, row_amax, column_amax, rows, columns
    if _has_no_launch(x):
        return _counted_steps(*given)
    counts = empty_counts(x, 2, _programs(x))
    return *_launch(*given, counts), counts


def _samples() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    noisy: dict[str, Any] = {"rounding": "stochastic", "seed": 5}
    for shape, dtype in (((16, 32), torch.bfloat16), ((48, 144), torch.float32), ((0, 16), torch.float16)):
        for turned in (
            TwoLevelScaling(block=(16, 1), packed="columns"),
            TwoLevelScaling(block=(16, 1), packed="columns", hadamard=(1, -1) * 8, **noisy),
        ):
            # a new matrix for each pair: Inductor can't compile two maxima of one matrix for a CPU (docs/upstream.md)
            x = torch.randn(shape[::-1], generator=generator).to(dtype).t()
            rows = TwoLevelScaling(rounding=turned.rounding, seed=turned.seed)
            amaxes = (each.outer_amax(each.amax(x)).clone() for each in (rows, turned))
            yield x, *amaxes, rows, turned


# no sharding rule: ranks can't cut packed codes
quantize_two_levels: OpOverload = register_kernel_op(
    "fp8compile::quantize_two_levels", _kernel, _step_by_step, fake=_empty_outputs, samples=_samples
)
quantize_two_levels_counted: OpOverload = register_kernel_op(
    "fp8compile::quantize_two_levels_counted", _counted_kernel, _counted_steps, fake=_counted_fake, samples=_samples
)
for op in (quantize_two_levels, quantize_two_levels_counted):
    inductor.register_fallback(op, contiguous=True)
