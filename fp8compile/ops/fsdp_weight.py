"""What the ops of sharded weights share: codes of a shard, put together, and fp8compile::fsdp_amax.

A weight is cut once by each dim of the mesh of tensor parallel ranks, if there are any, and then by rows over the
ranks of FSDP. Ops take the cuts of the former as numbers, `placed`: for each dim of that mesh -1, or the weight's dim
that it cuts, this rank's number, how many ranks there are, and what each of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import _compat
from fp8compile.ops.linear import linear_samples
from fp8compile.ops.parts import Codes, Cuts, Part, Shards, cast_part, quantize_part, sides_of, whole_amax
from fp8compile.ops.registry import register_op
from fp8compile.ops.rows import Rows
from fp8compile.ops.scale import scale
from fp8compile.quantizers import Quantizer, Recipe

__all__ = ["codes_of", "fsdp_amax", "gathered_codes", "placed_cuts", "placed_of", "rows_cut"]


def rows_cut(rows: Rows) -> Shards | None:
    """How FSDP cuts the rows that a rank would have; None for a group of one rank."""
    return None if len(rows.sizes) == 1 else Shards(rows.group, rows.rank, 0, rows.sizes)


def placed_of(cuts: Cuts) -> tuple[int, ...]:
    """Cuts of tensor parallel ranks as numbers."""
    found: list[int] = []
    for cut in cuts:
        found += [-1] if cut is None else [cut.dim, cut.rank, len(cut.sizes), *cut.sizes]
    return tuple(found)


def placed_cuts(placed: Sequence[int], groups: Sequence[ProcessGroup | str] = ()) -> Cuts:
    """Numbers as cuts; those of no group where none are given."""
    cuts: list[Shards | None] = []
    rest = list(placed)
    while rest:
        if rest[0] == -1:
            rest = rest[1:]
            cuts.append(None)
            continue
        dim, rank, ranks = rest[:3]
        group = groups[len(cuts)] if groups else ""
        cuts.append(Shards(group, rank, dim, tuple(rest[3 : 3 + ranks])))
        rest = rest[3 + ranks :]
    return tuple(cuts)


def _by_amax(part: Part, amax: Tensor, quantizer: Quantizer) -> Codes:
    """As `quantize_part`, by the amaxes of the whole."""
    multiplier, scales = scale(amax, quantizer)
    sides = sides_of(part.local.shape, part.cuts, quantizer.block)
    for dim, side in enumerate(sides):
        scales = side.window(scales, dim) if side.kind == "own" and side.block != -1 else scales
    is_cut = (sides[0].kind == "cut", sides[1].kind == "cut")
    return Codes(cast_part(part, multiplier, quantizer), scales, quantizer, part.cuts, is_cut)


def codes_of(part: Part, amax: Tensor | None, quantizer: Quantizer) -> Codes:
    """Codes of this rank's part of a weight, by the amaxes of the whole, if they are known."""
    return quantize_part(part, quantizer) if amax is None else _by_amax(part, amax, quantizer)


def gathered_codes(codes: Codes, *, in_backward: bool) -> Codes:
    """Codes of a weight: what the ranks of FSDP have, put together; as other ranks cut it.

    Args:
        codes: This rank's; the cut of FSDP is the last.
        in_backward: Whether this is the backward.
    """
    if codes.cuts[-1] is not None:
        with _compat.recomputed(in_backward=in_backward):
            codes = codes.gather(len(codes.cuts) - 1)
    return replace(codes, cuts=codes.cuts[:-1])


# ---------------------------------------------------------------------------------- amaxes, to be sent together


def _kernel(
    shard: Tensor,
    dtype: torch.dtype,
    rows: Rows,
    grid: Sequence[int],
    slot: str,
    recipe: Recipe,
) -> Tensor:
    """What this rank knows of the amaxes of the whole weight, ``grid``, float32: see `whole_amax`."""
    part = Part(shard.to(dtype), (*placed_cuts(rows.placed), rows_cut(rows)))
    return whole_amax(part, getattr(recipe, slot)).clone()


def _fake(
    shard: Tensor,
    dtype: torch.dtype,
    rows: Rows,
    grid: Sequence[int],
    slot: str,
    recipe: Recipe,
) -> Tensor:
    return shard.new_empty(tuple(grid), dtype=torch.float32)


def _samples() -> Iterator[tuple]:
    for index, (_, weight, _, recipe) in enumerate(linear_samples()):
        own = weight.float()[: 0 if index % 5 == 4 else 40]
        own = own.t().contiguous().t() if index % 2 else own
        for slot in ("weight", "weight_for_grad_input"):
            if (quantizer := getattr(recipe, slot)) is not None:
                grid = list(quantizer.scale_shape((40 + own.shape[0], own.shape[1])))
                rows = Rows(sizes=(40, own.shape[0]), rank=1, group="", replicas="", reduce_dtype="float32")
                yield own, weight.dtype, rows, grid, slot, recipe


fsdp_amax = register_op(
    "fp8compile::fsdp_amax",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_kernel,
    sharding=None,  # its tensors are this rank's
    samples=_samples,
)
