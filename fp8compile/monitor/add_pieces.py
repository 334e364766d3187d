"""fp8compile::add_pieces: combine partial counts of rows or blocks to sums and maxima over whole operands.

A casting kernel leaves one partial count for each row or block of a tensor. One op combines the partial counts of all
tensors of a layer, because separate graph nodes would prevent Inductor from fusing the casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import TensorLayout
from fp8compile.ops.registry import register_op

__all__ = ["FIRST_SUMS", "NUMEL", "PASSES", "VALUED", "Pieces", "add_pieces", "rows_of"]

NUMEL = "numel"  # number of elements
VALUED = "valued"  # number of elements of which values are known, and not only codes
PASSES = "passes"  # how often all elements of the tensor were counted; a rank's part counts as a part of one
FIRST_SUMS = (NUMEL, VALUED, PASSES)  # the first sums of every operand


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The partial counts of one operand on this rank.

    Attributes:
        sums: For each sum, a number for each row or block: (E, pieces) for E matrices or groups, with E = 1 for one
            matrix; (rows,) if rows have groups. None if this sum is computed elsewhere. At least one of ``sums`` and
            ``maxima`` is not None.
        maxima: The same for each maximum.
        group: The group of each row, E after the last of E groups; None if pieces are per matrix or per group.
        numel: Number of elements of each matrix; with groups, (E,) float64.
        has_values: Whether values are known, and not only codes.
        counts: Whether this rank adds its elements to sums; False if another rank adds the same elements.
        layout: The layout of the values, from which this rank's share of each matrix's elements is computed.
        first: Index of this rank's first matrix among all ranks' matrices.
    """

    sums: tuple[Tensor | None, ...]
    maxima: tuple[Tensor | None, ...]
    group: Tensor | None
    numel: Tensor | int
    has_values: bool
    counts: bool
    layout: TensorLayout
    first: int = 0

    def flags(self) -> list[int]:
        """Return five ints: ``first``, ``has_values``, ``counts``, numerator and denominator of a fraction.

        The fraction is this rank's share of each matrix's elements.
        """
        cuts = [cut for cut in self.layout.cuts if cut is not None and cut.dim >= self.layout.batch]
        length = total = 1
        for cut in cuts:
            length, total = length * cut.length, total * cut.total
        return [self.first, int(self.has_values), int(self.counts), length, total]


FLAGS = 5


def rows_of(
    found: Mapping[str, Pieces | None], roles: Sequence[str], counts: tuple[int, int], matrices: int, like: Tensor
) -> Tensor:
    """Combine partial counts to sums and maxima, with a row for each of ``roles``, fields of a recipe.

    Args:
        found: Partial counts by field; two fields may share them.
        roles: The fields, such as ``"weight"``. A field without partial counts gets the totals of no elements.
        counts: Two ints: the number of sums, and of maxima.
        matrices: Number E of stacked matrices, or of groups; 1 for one matrix.
        like: A tensor on the result's device.

    Returns:
        (roles, 3 + sums + maxima, E) float64; the first three columns are `FIRST_SUMS`.
    """
    every = [each for role in roles if (each := found.get(role)) is not None]
    distinct = list({id(each): each for each in every}.values())
    if not distinct:
        return _no_elements((len(roles), len(FIRST_SUMS) + sum(counts), matrices), counts[1], like.device)
    places = {id(each): index for index, each in enumerate(distinct)}
    grouped = [each for each in distinct if each.group is not None]
    pieces: dict[int, Tensor] = {}  # each once, or else Inductor copies a view of it
    numbers: list[int] = []
    for operand, each in enumerate(distinct):
        for column, piece in enumerate((*each.sums, *each.maxima)):
            if piece is not None:
                pieces.setdefault(id(piece), piece)
                numbers += [list(pieces).index(id(piece)), operand, column]
    return add_pieces(
        list(pieces.values()),
        numbers,
        list(counts),
        [each.group for each in grouped],
        [each.numel for each in distinct if isinstance(each.numel, Tensor)],
        [-1 if isinstance(each.numel, Tensor) else each.numel for each in distinct],
        [flag for each in distinct for flag in each.flags()],
        [-1 if (each := found.get(role)) is None else places[id(each)] for role in roles],
        matrices,
    )


def _no_elements(shape: Sequence[int], maxima: int, device: torch.device) -> Tensor:
    """Return totals of no elements, (..., columns, matrices): 0, but -inf in the last ``maxima`` columns."""
    found = torch.zeros(shape, dtype=torch.float64, device=device)
    found[..., shape[-2] - maxima :, :] = -torch.inf
    return found


def _threes(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[start : start + 3] for start in range(0, len(numbers), 3)]


def _by_matrix(numbers: Tensor, group: Tensor | None, matrices: int, neutral: float) -> Tensor:
    """Convert numbers to float64; with groups, to (groups, numbers), where numbers of other groups are ``neutral``."""
    numbers = numbers.double()
    if group is None:
        return numbers
    return torch.where(torch.arange(matrices, device=numbers.device).unsqueeze(1) == group, numbers, neutral)


def _impl(
    pieces: Sequence[Tensor],
    numbers: Sequence[int],
    columns: Sequence[int],
    groups: Sequence[Tensor],
    sizes: Sequence[Tensor],
    numels: Sequence[int],
    flags: Sequence[int],
    rows: Sequence[int],
    matrices: int,
) -> Tensor:
    """Combine the partial counts of one or more operands to sums and maxima over each matrix; see `Pieces`.

    Args:
        pieces: Partial results of rows or blocks.
        numbers: Three ints for each sum or maximum: its index in ``pieces``, its operand's index, and its column of
            the result, counted after `FIRST_SUMS` (sums, then maxima).
        columns: Two ints: the number of columns that are sums, and of columns that are maxima.
        groups: The group of each row, for each operand whose pieces are of rows in groups.
        sizes: Number of elements of each group, (E,) float64, for each operand with groups.
        numels: Number of elements of each matrix, for each operand; -1 with groups.
        flags: `Pieces.flags` of each operand.
        rows: For each row of the result, the index of the operand that it describes; -1 for one without elements.
        matrices: Number of matrices of the result.

    Returns:
        (rows, 3 + sums + maxima, matrices) float64; the first three columns are `FIRST_SUMS`.
    """
    every_group, every_size = iter(groups), iter(sizes)
    found: list[Tensor] = []
    for operand, numel in enumerate(numels):
        own = [each for each in _threes(numbers) if each[1] == operand]
        first, has_values, counts, length, total = flags[operand * FLAGS :][:FLAGS]
        one = pieces[own[0][0]]
        group = next(every_group) if one.ndim == 1 else None
        if numel == -1:
            size = next(every_size)
        else:
            size = torch.full((one.shape[0],), numel, dtype=torch.float64, device=one.device)
        row = _no_elements((len(FIRST_SUMS) + sum(columns), matrices), columns[1], one.device)
        here = row[:, first : first + len(size)]
        for at, _, column in own:
            values = pieces[at]
            if column < columns[0]:
                here[len(FIRST_SUMS) + column] = _by_matrix(values, group, len(size), 0.0).sum(-1)
            else:
                largest = pad(_by_matrix(values, group, len(size), -torch.inf), (0, 1), value=-torch.inf)
                here[len(FIRST_SUMS) + column] = largest.amax(-1)
        if counts:
            part = torch.full_like(size, length / total if total else 0.0)
            here[: len(FIRST_SUMS)] = torch.stack((size, size * has_values, part))
        else:
            here[: len(FIRST_SUMS) + columns[0]] = 0
        found.append(row)
    found.append(_no_elements(found[0].shape, columns[1], found[0].device))
    return torch.stack([found[row] for row in rows])


def _fake(pieces: Sequence[Tensor], numbers: Any, columns: Sequence[int], *others: Any) -> Tensor:
    *_, rows, matrices = others
    return pieces[0].new_empty((len(rows), len(FIRST_SUMS) + sum(columns), matrices), dtype=torch.float64)


add_pieces: OpOverload = register_op(
    "fp8compile::add_pieces",
    _impl,
    fake=_fake,
    backward=None,
    decompose=None,
    sharding=None,  # of one rank, whose elements they are
)
