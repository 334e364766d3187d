"""Conversion of 4-bit codes between two per byte (for messages) and one per byte (for shards of any size)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor

from fp8compile.formats import pack, unpack
from fp8compile.quantizers import GEMMS, Quantizer, Recipe, TwoLevelScaling

__all__ = ["are_same_codes", "one_a_byte", "packed_dim", "packed_in_rows", "two_a_byte", "with_a_code_a_byte"]

DIMS = {"rows": -1, "columns": -2}  # the dim whose neighbours share a byte, in a matrix or each matrix of a stack


def packed_dim(quantizer: Quantizer) -> int | None:
    """Return the dim, -1 or -2, along which two codes of a `TwoLevelScaling` share a byte; else None."""
    return DIMS.get(quantizer.packed) if isinstance(quantizer, TwoLevelScaling) else None


def packed_in_rows(quantizer: Quantizer, shape: Sequence[int]) -> Quantizer:
    """Return ``quantizer.for_shape``, but packing along rows if ``quantizer`` packs square blocks along columns.

    Square blocks have the same codes, however they are packed. ``shape`` is (..., rows, columns).
    """
    if (
        isinstance(quantizer, TwoLevelScaling)
        and packed_dim(quantizer) == DIMS["columns"]
        and quantizer.block[0] == quantizer.block[1]
    ):
        quantizer = replace(quantizer, packed="rows")
    return quantizer.for_shape(shape[-2:])


def one_a_byte(codes: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantizer]:
    """Unpack codes of a matrix or stacked matrices to one per byte; return them and the quantizer of unpacked codes.

    ``quantizer`` made the codes. If it does not pack, both arguments are returned unchanged.
    """
    if (dim := packed_dim(quantizer)) is None:
        return codes, quantizer
    return unpack(codes, dim), quantizer.unpacked() or quantizer


def two_a_byte(codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Pack codes, one per byte, as ``quantizer`` stores codes; without packing, returns ``codes``."""
    return codes if (dim := packed_dim(quantizer)) is None else pack(codes, dim)


def are_same_codes(one: Quantizer | None, other: Quantizer | None) -> bool:
    """Whether two quantizers make the same codes, packed or not; two Nones count as the same."""
    if one is None or other is None:
        return one is other
    return one == other or (one.unpacked() or one) == (other.unpacked() or other)


@cache
def with_a_code_a_byte(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe with one code per byte, for ops whose shards may end inside of a byte.

    Quantizers with an outer scale do not change.
    """
    roles = {role: getattr(recipe, role) for gemm in GEMMS for role in (gemm.a, gemm.b)}
    packs = {role: each for role, each in roles.items() if each is not None and not each.has_outer_scale()}
    changed = {role: own for role, each in packs.items() if (own := each.unpacked()) is not None and own != each}
    return replace(recipe, **changed) if changed else recipe
