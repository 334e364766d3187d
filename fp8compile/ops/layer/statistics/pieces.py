"""Partial sums and maxima ("pieces") of the casts of a layer's tensors; `add_pieces` combines them to totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.counting_kernels import COUNTED, pieces_of_counts
from fp8compile.ops.layer.one_read import ALONG_ROWS
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, Operands, Phase
from fp8compile.ops.layer.statistics.add_pieces import Piece, Pieces
from fp8compile.ops.layer.statistics.definitions import Total, columns_of, counts_slot
from fp8compile.ops.layer.statistics.elements import (
    Elements,
    counts_of_pieces,
    elements_of,
    elements_of_codes,
    numbers_of,
    numel_of_groups,
    pieces_of,
)
from fp8compile.ops.noted_codes import noted_counts
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.quantizers import TENSORS, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["FOR_GRADIENTS", "Seen", "counted"]

FOR_GRADIENTS = (GRAD_WEIGHT.b, GRAD_INPUT.b)  # the forward's tensors as gradients are made of them

HALVES = {"underflow": 0, "saturation": 1}  # totals that `count_cast` counts

IsHere = Callable[[str, Quantized | None], bool]


@dataclass(frozen=True)
class Seen:
    """One of a layer's tensors on this rank, for statistics.

    Attributes:
        part: This rank's part of the values; None if only codes are known.
        counts: Whether this rank adds its elements to sums; False if another rank adds the same elements.
        codes: Codes that exist already, by field of the recipe.
    """

    part: Plain | None
    counts: bool = True
    codes: Mapping[str, Quantized] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cast:
    """The elements of one cast, and how to store their counts.

    Attributes:
        elements: Values, codes and scales.
        layout: The layout of the values.
        dtype: A dtype that holds the magnitudes of the values.
        has_magnitudes: Whether this cast counts magnitudes; False if another cast of the same values does.
    """

    elements: Elements
    layout: TensorLayout
    dtype: torch.dtype
    has_magnitudes: bool


def counted(
    tensors: Mapping[str, Seen], operands: Operands, names: str, is_here: IsHere, first: int = 0
) -> dict[str, Pieces | None]:
    """Compute partial sums and maxima of the casts of a layer's tensors, by field of the recipe.

    Args:
        tensors: The tensors, by their keys in ``TENSORS``.
        operands: Makes codes that do not exist yet.
        names: Names of the totals, such as ``"amax,underflow"`` (`totals_of`).
        is_here: Function (field, codes): whether this op, and not the layer's other op, counts the codes of a field.
            It is called twice: first with codes None, before they are made.
        first: Index of this rank's first matrix among the matrices of all ranks.
    """
    found: dict[str, Pieces | None] = {}
    for tensor, seen in tensors.items():
        own, other = TENSORS[tensor]
        shares = _share_magnitudes(seen, operands.recipe, names, (own, other))
        is_forward = is_here(own, None)
        known: dict[Any, Pieces | None] = {}
        for slot in (own, other):
            quantizer = getattr(operands.recipe, slot)
            if quantizer is None or not counts_slot(names, slot) or (seen.part is None and slot not in seen.codes):
                continue
            key = quantizer if seen.part is not None else slot
            if key not in known:
                has_magnitudes = slot == own or is_forward or not shares
                known[key] = _of_slot(seen, slot, operands, names, is_here, first, has_magnitudes=has_magnitudes)
            found[slot] = known[key]
        if shares and is_forward and found[other] is None:
            found[other] = _magnitudes_alone(found[own], names)
    return found


def _share_magnitudes(seen: Seen, recipe: Recipe, names: str, slots: tuple[str, str]) -> bool:
    """Whether one cast of a tensor counts totals of magnitudes for both casts, because both read the same values."""
    if seen.part is None or slots[1] not in FOR_GRADIENTS:
        return False
    own, other = (getattr(recipe, slot) if counts_slot(names, slot) else None for slot in slots)
    return own is not None and other is not None and own.transform() == other.transform()


def _magnitudes_alone(found: Any, names: str) -> Pieces:
    if _are_magnitudes(names):
        return found
    sums, maxima = columns_of(names)
    own = (each if total.is_magnitude else None for total, each in zip(maxima, found.maxima, strict=True))
    return replace(found, sums=(None,) * len(sums), maxima=tuple(own), counts=False)


def _are_magnitudes(names: str) -> bool:
    sums, maxima = columns_of(names)
    return not sums and all(total.is_magnitude for total in maxima)


def _of_slot(
    seen: Seen, slot: str, operands: Operands, names: str, is_here: IsHere, first: int, *, has_magnitudes: bool
) -> Pieces | None:
    if not is_here(slot, None) or (_are_magnitudes(names) and not has_magnitudes):
        return None
    if seen.part is None:
        found = seen.codes[slot]
        cast = _Cast(elements_of_codes(found), found.layout, torch.float32, has_magnitudes)
        return _of_elements(cast, names, counts=seen.counts, first=first)
    is_counted = all(each.name in COUNTED for columns in columns_of(names) for each in columns)
    own, found = (replace(operands, counts=True) if is_counted else operands).own(seen.part, slot)
    if not is_here(slot, found):
        return None
    if found.counts is not None:
        return _of_counts(found, seen.part, own.layout, names, counts=seen.counts, first=first)
    noted = own.local if is_counted and operands.notes(own, slot) else None
    dtype = torch.float32 if found.quantizer.transform() else own.local.dtype
    in_backward = operands.phase is Phase.BACKWARD
    by_rows = in_backward and slot == GRAD_WEIGHT.b and inductor.is_made_by_rows(own.local)  # with its norm's gradient
    own = own if operands.phase is Phase.EAGER else replace(own, local=rounded(own.local, apart=in_backward))
    # the partitioner would count in the forward, which needs no tangent, and so cast there too
    with inductor.left_in_backward() if in_backward else nullcontext():
        shape, along_tokens = seen.part.local.shape, slot in ALONG_ROWS
        elements = elements_of(own, found, shape, along_tokens=along_tokens, by_rows=by_rows)
        cast = _Cast(elements, own.layout, dtype, has_magnitudes)
        pieces = _of_elements(cast, names, counts=seen.counts, first=first)
        return pieces if noted is None else _noted(pieces, noted, found.quantizer)


def _of_counts(found: Any, part: Plain, layout: TensorLayout, names: str, *, counts: bool, first: int) -> Pieces:
    """Make `Pieces` from the statistics that a casting kernel returned together with codes, ``found.counts``."""
    sums, maxima = columns_of(names)
    local, ends, matrices = part.local, layout.ends, 1
    numel: Tensor | int = local.shape[layout.batch :].numel()
    if ends is not None:
        matrices, numel = ends.shape[0], numel_of_groups(ends, found.quantizer, local.shape[1])
    elif layout.batch:
        matrices = local.shape[0]
    return Pieces(
        sums=tuple(Piece(pieces_of_counts(found.counts, each.name, matrices)) for each in sums),
        maxima=tuple(Piece(pieces_of_counts(found.counts, each.name, matrices)) for each in maxima),
        group=None,
        numel=numel,
        has_values=True,
        counts=counts,
        layout=layout,
        first=first,
    )


def _of_elements(cast: _Cast, names: str, *, counts: bool, first: int) -> Pieces:
    sums, maxima = columns_of(names)
    elements = cast.elements
    return Pieces(
        sums=tuple(_sum(total, elements) for total in sums),
        maxima=tuple(_largest(total, cast) for total in maxima),
        group=elements.group,
        numel=elements.numel,
        has_values=elements.has_values,
        counts=counts,
        layout=cast.layout,
        first=first,
    )


def _noted(found: Pieces, x: Tensor, quantizer: Quantizer) -> Pieces:
    """Record in the graph which cast these counts belong to, so that the kernel that casts can also count."""
    noted: dict[int, Tensor] = {}  # totals that share a number go on sharing it

    def note(piece: Piece | None) -> Piece | None:
        if piece is None:
            return None
        if id(piece.numbers) not in noted:
            noted[id(piece.numbers)] = noted_counts(piece.numbers, as_matrix(x), quantizer, piece.half != -1)
        return Piece(noted[id(piece.numbers)], piece.half)

    return replace(found, sums=tuple(map(note, found.sums)), maxima=tuple(map(note, found.maxima)))


def _sum(total: Total, elements: Elements) -> Piece:
    if total.name in HALVES and not elements.lanes:
        return Piece(elements.once(counts_of_pieces), HALVES[total.name])
    return Piece(pieces_of(elements, numbers_of(elements, total.compute, "sum"), "sum"))


def _largest(total: Total, cast: _Cast) -> Piece | None:
    """Return the partial maxima of a total; maxima of magnitudes are converted to ``cast.dtype``.

    None if the total is of magnitudes, and another cast counts them.
    """
    if total.is_magnitude and not cast.has_magnitudes:
        return None
    found = numbers_of(cast.elements, total.compute, "max")
    return Piece(pieces_of(cast.elements, found.to(cast.dtype) if total.is_magnitude else found, "max"))
