"""fp8compile::add_pieces: totals of a layer's tensors, of pieces that kernels have counted beside their casts.

A kernel that casts goes through the tensor by rows or by blocks, and leaves a number for each. They are few, and one
call adds them all: with a node for each sum, Inductor would find casts too far from each other to make one kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad

from fp8compile.layout.quantized import TensorLayout
from fp8compile.ops.registry import register_op

__all__ = ["FIRST_SUMS", "NUMEL", "PASSES", "VALUED", "Pieces", "Totals", "add_pieces", "rows_of"]

NUMEL = "numel"  # number of elements
VALUED = "valued"  # number of elements of which values are known, and not only codes
PASSES = "passes"  # how often all elements of the tensor were counted; a rank's part counts as a part of one
FIRST_SUMS = (NUMEL, VALUED, PASSES)  # the first sums of every operand


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is counted of one operand on this rank.

    Attributes:
        sums: A tensor for each total that is added: (E, pieces), and E is 1 for a matrix; (rows,) with groups.
        maxima: A tensor for each total that is a maximum, in the shapes of ``sums``.
        group: The group of each row, E for a row of none; None without groups.
        numel: Number of elements of each matrix; of groups (E,) float64.
        has_values: Whether values are known, and not only codes.
        counts: Whether this rank adds its elements to sums; it does not if another rank adds the same.
        layout: The layout of the values; how ranks cut them says which part of all elements these are.
        first: Index of the first matrix among those of all ranks.
    """

    sums: tuple[Tensor, ...]
    maxima: tuple[Tensor, ...]
    group: Tensor | None
    numel: Tensor | int
    has_values: bool
    counts: bool
    layout: TensorLayout
    first: int = 0

    def flags(self) -> list[int]:
        """The first matrix, whether values are known, whether elements count, and the part of all: a quotient."""
        cuts = [cut for cut in self.layout.cuts if cut is not None and cut.dim >= self.layout.batch]
        length = total = 1
        for cut in cuts:
            length, total = length * cut.length, total * cut.total
        return [self.first, int(self.has_values), int(self.counts), length, total]


FLAGS = 5
Totals = tuple[Tensor, Tensor]


def rows_of(
    found: Mapping[str, Pieces | None], slots: Sequence[str], counts: tuple[int, int], matrices: int, like: Tensor
) -> Totals:
    """Rows of a buffer: the totals of these fields of a recipe.

    Args:
        found: What is counted of a field; two fields may share it.
        slots: The fields. Those without an entry have no elements.
        counts: Number of totals that are added, and of maxima.
        matrices: Number of matrices, or of groups; 1 without.
        like: A tensor on the device.

    Returns:
        (slots, 3 + sums, E) float64, `FIRST_SUMS` before the others, and (slots, maxima, E) float32.
    """
    every = [each for slot in slots if (each := found.get(slot)) is not None]
    distinct = list({id(each): each for each in every}.values())
    if not distinct:
        return (
            like.new_zeros((len(slots), len(FIRST_SUMS) + counts[0], matrices), dtype=torch.float64),
            like.new_full((len(slots), counts[1], matrices), -torch.inf, dtype=torch.float32),
        )
    places = {id(each): index for index, each in enumerate(distinct)}
    grouped = [each for each in distinct if each.group is not None]
    return add_pieces(
        [piece for each in distinct for piece in each.sums],
        [piece for each in distinct for piece in each.maxima],
        [each.group for each in grouped],
        [each.numel for each in grouped],
        [0 if isinstance(each.numel, Tensor) else each.numel for each in distinct],
        [flag for each in distinct for flag in each.flags()],
        [-1 if (each := found.get(slot)) is None else places[id(each)] for slot in slots],
        matrices,
    )


def _added(piece: Tensor, combine: str, group: Tensor | None, matrices: int) -> Tensor:
    """One number for each matrix: (E,) float64 for sums, float32 for maxima, which are -inf without elements."""
    neutral, dtype = (0, torch.float64) if combine == "sum" else (-torch.inf, torch.float32)
    piece = piece.to(dtype)
    if group is not None:
        piece = torch.where(torch.arange(matrices, device=piece.device).unsqueeze(1) == group, piece, neutral)
    return piece.sum(-1) if combine == "sum" else pad(piece, (0, 1), value=neutral).amax(-1)


def _counts(sums: Sequence[Tensor], maxima: Sequence[Tensor], numels: Sequence[int]) -> tuple[int, int]:
    return len(sums) // len(numels), len(maxima) // len(numels)


def _impl(
    sums: Sequence[Tensor],
    maxima: Sequence[Tensor],
    groups: Sequence[Tensor],
    sizes: Sequence[Tensor],
    numels: Sequence[int],
    flags: Sequence[int],
    rows: Sequence[int],
    matrices: int,
) -> tuple[Tensor, Tensor]:
    """Add the pieces of one or more operands; see `Pieces`.

    Args:
        sums: The pieces to add, operand by operand; those with groups are (rows,), the others (E, pieces).
        maxima: The pieces to take maxima of, operand by operand.
        groups: The group of each row, for each operand with groups.
        sizes: Number of elements of each group, for the same operands.
        numels: Number of elements of each matrix, for each operand; 0 with groups.
        flags: `Pieces.flags` of each operand.
        rows: The operand of each row of the result; -1 for a row without elements.
        matrices: Number of matrices of the result.
    """
    (own_sums, own_maxima), with_groups = _counts(sums, maxima, numels), zip(groups, sizes, strict=True)
    found: list[Totals] = []
    for index, numel in enumerate(numels):
        added, most = sums[index * own_sums :][:own_sums], maxima[index * own_maxima :][:own_maxima]
        first, has_values, counts, length, total = flags[index * FLAGS :][:FLAGS]
        one, group = next(itertools.chain(added, most)), None
        if one.ndim == 1:
            group, size = next(with_groups)
        else:
            size = torch.full((one.shape[0],), numel, dtype=torch.float64, device=one.device)
        part = torch.full_like(size, length / total if total else 0.0)
        columns = [size, size * has_values, part, *(_added(each, "sum", group, len(size)) for each in added)]
        largest = [
            torch.full_like(size, -torch.inf).float(),
            *(_added(each, "max", group, len(size)) for each in most),
        ]
        place = first, matrices - first - len(size)
        own = torch.stack(columns) if counts else torch.stack(columns).zero_()
        found.append((pad(own, place), pad(torch.stack(largest)[1:], place, value=-torch.inf)))
    found.append((torch.zeros_like(found[0][0]), torch.full_like(found[0][1], -torch.inf)))
    return torch.stack([found[row][0] for row in rows]), torch.stack([found[row][1] for row in rows])


def _fake(
    sums: Sequence[Tensor],
    maxima: Sequence[Tensor],
    groups: Sequence[Tensor],
    sizes: Sequence[Tensor],
    numels: Sequence[int],
    flags: Sequence[int],
    rows: Sequence[int],
    matrices: int,
) -> tuple[Tensor, Tensor]:
    (own_sums, own_maxima), like = _counts(sums, maxima, numels), next(itertools.chain(sums, maxima))
    return (
        like.new_empty((len(rows), len(FIRST_SUMS) + own_sums, matrices), dtype=torch.float64),
        like.new_empty((len(rows), own_maxima, matrices), dtype=torch.float32),
    )


def _samples() -> Iterator[tuple[Any, ...]]:
    counts, magnitudes = torch.arange(6, dtype=torch.int32), torch.arange(6.0)
    one = [0, 1, 1, 1, 2]  # flags of a matrix, of which this rank has a half
    for turned in (counts.view(1, 6), counts.view(6, 1).t()):
        yield [turned, turned % 2], [magnitudes.view(1, 6)], [], [], [24], one, [0, -1, 0], 1
    yield [counts.view(2, 3)], [magnitudes.view(3, 2).t()], [], [], [12], [1, 0, 1, 1, 1], [0, -1], 4
    group, sizes = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([8.0, 4.0, 4.0], dtype=torch.float64)
    flags = [*one, 0, 1, 0, 1, 1]  # another rank counts the second one's elements
    yield [counts, counts.view(1, 6)], [], [group], [sizes], [0, 24], flags, [1, 0], 3
    yield [], [magnitudes[:0].view(1, 0)], [], [], [0], [0, 1, 1, 0, 0], [0], 1


add_pieces: OpOverload = register_op(
    "fp8compile::add_pieces",
    _impl,
    fake=_fake,
    backward=None,
    decompose=None,
    sharding=None,  # of one rank, whose elements they are
    samples=_samples,
)
