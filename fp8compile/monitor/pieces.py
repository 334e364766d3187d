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
from fp8compile.monitor.add_pieces import Pieces
from fp8compile.monitor.definitions import Total, columns_of, counts_role
from fp8compile.monitor.elements import (
    Elements,
    elements_of,
    elements_of_codes,
    numbers_of,
    pieces_of,
)
from fp8compile.ops.layer.one_read import ALONG_ROWS
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, Operands, Phase
from fp8compile.ops.rounding_barrier import rounded
from fp8compile.quantizers import TENSORS, Recipe

__all__ = ["FOR_GRADIENTS", "Seen", "counted"]

FOR_GRADIENTS = (GRAD_WEIGHT.b, GRAD_INPUT.b)  # the forward's tensors as gradients are made of them

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
        for role in (own, other):
            quantizer = getattr(operands.recipe, role)
            if quantizer is None or not counts_role(names, role) or (seen.part is None and role not in seen.codes):
                continue
            key = quantizer if seen.part is not None else role
            if key not in known:
                has_magnitudes = role == own or is_forward or not shares
                known[key] = _of_role(seen, role, operands, names, is_here, first, has_magnitudes=has_magnitudes)
            found[role] = known[key]
        if shares and is_forward and found[other] is None:
            found[other] = _magnitudes_alone(found[own], names)
    return found


def _share_magnitudes(seen: Seen, recipe: Recipe, names: str, roles: tuple[str, str]) -> bool:
    """Whether one cast of a tensor counts totals of magnitudes for both casts, because both read the same values."""
    if seen.part is None or roles[1] not in FOR_GRADIENTS:
        return False
    own, other = (getattr(recipe, role) if counts_role(names, role) else None for role in roles)
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


def _of_role(
    seen: Seen, role: str, operands: Operands, names: str, is_here: IsHere, first: int, *, has_magnitudes: bool
) -> Pieces | None:
    if not is_here(role, None) or (_are_magnitudes(names) and not has_magnitudes):
        return None
    if seen.part is None:
        found = seen.codes[role]
        cast = _Cast(elements_of_codes(found), found.layout, torch.float32, has_magnitudes)
        return _of_elements(cast, names, counts=seen.counts, first=first)
    own, found = operands.own(seen.part, role)
    if not is_here(role, found):
        return None
    dtype = torch.float32 if found.quantizer.transform() else own.local.dtype
    in_backward = operands.phase is Phase.BACKWARD
    by_rows = in_backward and role == GRAD_WEIGHT.b and inductor.is_made_by_rows(own.local)  # with its norm's gradient
    own = own if operands.phase is Phase.EAGER else replace(own, local=rounded(own.local, apart=in_backward))
    # the partitioner would count in the forward, which needs no tangent, and so cast there too
    with inductor.left_in_backward() if in_backward else nullcontext():
        shape, along_tokens = seen.part.local.shape, role in ALONG_ROWS
        elements = elements_of(own, found, shape, along_tokens=along_tokens, by_rows=by_rows)
        cast = _Cast(elements, own.layout, dtype, has_magnitudes)
        return _of_elements(cast, names, counts=seen.counts, first=first)


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


def _sum(total: Total, elements: Elements) -> Tensor:
    return pieces_of(elements, numbers_of(elements, total.compute, "sum"), "sum")


def _largest(total: Total, cast: _Cast) -> Tensor | None:
    """Return the partial maxima of a total; maxima of magnitudes are converted to ``cast.dtype``.

    None if the total is of magnitudes, and another cast counts them.
    """
    if total.is_magnitude and not cast.has_magnitudes:
        return None
    found = numbers_of(cast.elements, total.compute, "max")
    return pieces_of(cast.elements, found.to(cast.dtype) if total.is_magnitude else found, "max")
