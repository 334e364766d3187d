"""fp8compile::quantize_several: quantize several matrices that are computed from the same tensors, in one kernel.

The backward of a gated feed-forward quantizes the gradients of gate and up in both directions, and the activation
along tokens. All three are computed pointwise from the same two or three tensors, which Inductor would read twice: for
all amaxes, and for all codes. This op's kernel computes and quantizes a tile of each matrix. If Inductor has stored a
matrix already, the kernels of `quantize_both` and `quantize_columns` run instead.

`fp8compile.ops.fuse_noted` puts the op into graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile.inductor import TileLaunch
from fp8compile.kernels.programs import several_programs
from fp8compile.ops.counting_kernels import counts_of_blocks, counts_of_steps, empty_counts
from fp8compile.ops.quantize_both import empty_outputs, quantize_both, quantize_both_counted, two_casts
from fp8compile.ops.quantize_columns import (
    cast_along_columns,
    empty_columns,
    quantize_columns,
    quantize_columns_counted,
)
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = ["quantize_several", "quantize_several_counted"]


def _each(
    both: Callable[..., Iterable[Tensor]],
    one: Callable[..., Iterable[Tensor]],
    matrices: Sequence[Tensor],
    in_both: int,
    rows: Quantizer,
    columns: Quantizer,
    others: Quantizer,
) -> list[Tensor]:
    found: list[Tensor] = []
    for number, x in enumerate(matrices):
        found += both(x, rows, columns) if number < in_both else one(x, others)
    return found


def _fake(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    return _each(empty_outputs, empty_columns, matrices, in_both, rows, columns, others)


def _steps(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    return _each(two_casts, cast_along_columns, matrices, in_both, rows, columns, others)


def _kernel(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    """Quantize matrices; the first ``in_both`` along rows and columns, the others along columns.

    Args:
        matrices: (M, K) each, float32, bfloat16 or float16.
        in_both: Number of matrices that are quantized along rows and along columns; 1 or more.
        rows: Quantizer along rows; with ``columns`` a pair that `fp8compile.ops.quantize_both` takes.
        columns: Quantizer along columns.
        others: Quantizer along columns of the other matrices, with the same block as ``columns``.

    Returns:
        For each matrix: codes and scales along rows (only for the first ``in_both``), codes and scales along columns.
    """
    return _each(quantize_both, quantize_columns, matrices, in_both, rows, columns, others)


# ---------------------------------------------------------------------------------- with counts


def _programs(x: Tensor, quantizer: Quantizer) -> int:
    return math.prod(several_programs(x.shape, quantizer.block[0]))


def _counted_fake(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    programs = _programs(matrices[0], columns)

    def both(x: Tensor, *quantizers: Quantizer) -> list[Tensor]:
        return [*empty_outputs(x, *quantizers), empty_counts(x, 2, programs)]

    def one(x: Tensor, quantizer: Quantizer) -> list[Tensor]:
        return [*empty_columns(x, quantizer), empty_counts(x, 1, programs)]

    return _each(both, one, matrices, in_both, rows, columns, others)


def _counted_steps(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    programs = _programs(matrices[0], columns)

    def counted(x: Tensor, found: Sequence[Tensor], *quantizers: Quantizer) -> list[Tensor]:
        each = zip(found[::2], found[1::2], quantizers, strict=True)
        return [*found, counts_of_steps([counts_of_blocks(x, *own) for own in each], programs)]

    return _each(
        lambda x, *own: counted(x, two_casts(x, *own), *own),
        lambda x, own: counted(x, cast_along_columns(x, own), own),
        matrices, in_both, rows, columns, others,
    )  # fmt: skip


def _counted_kernel(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    programs = _programs(matrices[0], columns)

    def with_all_programs(found: Sequence[Tensor]) -> list[Tensor]:  # one matrix has larger tiles, and fewer of them
        *results, counts = found
        return [*results, pad(counts, (0, programs - counts.shape[-1]))]

    return _each(
        lambda x, *own: with_all_programs(quantize_both_counted(x, *own)),
        lambda x, own: with_all_programs(quantize_columns_counted(x, own)),
        matrices, in_both, rows, columns, others,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- registration


def _launch(counts: bool) -> Callable[..., TileLaunch]:
    def launch(matrices: Sequence[Tensor], in_both: int, rows: Any, columns: Any, others: Any) -> TileLaunch:
        from fp8compile.kernels.both_directions import tiles_of_several

        pairs = [(rows, columns) if number < in_both else (None, others) for number in range(len(matrices))]
        return tiles_of_several(matrices[0].shape, pairs, counts=counts)

    return launch


def _samples() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")
    others = CurrentScaling(block=(16, 1), format="e5m2")
    for dtype, in_both in ((torch.bfloat16, 2), (torch.float32, 1)):
        matrices = [torch.randn(20, 40, generator=generator).to(dtype) for _ in range(3)]
        yield matrices, in_both, rows, columns, others
    yield [torch.randn(24, 17, generator=generator).half().t()], 1, rows, columns, others
    yield [torch.empty(0, 32)] * 2, 1, rows, columns, others


def _register(name: str, kernel: Any, fake: Any, steps: Any, *, counts: bool) -> OpOverload:
    op = register_op(
        name, kernel, fake=fake, backward=None, decompose=None, portable=steps, sharding=None, samples=_samples
    )
    inductor.register_tile_kernel(op, _launch(counts))
    return op


quantize_several: OpOverload = _register("fp8compile::quantize_several", _kernel, _fake, _steps, counts=False)
quantize_several_counted: OpOverload = _register(
    "fp8compile::quantize_several_counted", _counted_kernel, _counted_fake, _counted_steps, counts=True
)
"""Return the results of `quantize_several`; each matrix's counts follow its results."""
