"""Codes of four bits between two forms: two to a byte, as they travel, and one a byte, which ranks can cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor

from fp8compile.formats import pack, unpack
from fp8compile.quantizers import GEMMS, Quantizer, Recipe, TwoLevelScaling

__all__ = ["are_same_codes", "one_a_byte", "packed_dim", "packed_in_rows", "two_a_byte", "with_a_code_a_byte"]

DIMS = {"rows": -1, "columns": -2}  # whose neighbours share a byte, of a matrix or of each in a stack


def packed_dim(quantizer: Quantizer) -> int | None:
    """The dim of a matrix whose neighbouring codes share a byte, -1 or -2; None of none, or of another's class."""
    return DIMS.get(quantizer.packed) if isinstance(quantizer, TwoLevelScaling) else None


def packed_in_rows(quantizer: Quantizer, shape: Sequence[int]) -> Quantizer:
    """The quantizer of the same codes, of which two of a row share a byte if they can.

    With square blocks it doesn't matter to codes along which side of a matrix they are packed.

    Args:
        quantizer: Any.
        shape: Shape of the matrix, or of a stack of matrices.
    """
    if packed_dim(quantizer) == DIMS["columns"] and quantizer.block[0] == quantizer.block[1]:
        quantizer = replace(quantizer, packed="rows")
    return quantizer.for_shape(shape[-2:])


def one_a_byte(codes: Tensor, quantizer: Quantizer) -> tuple[Tensor, Quantizer]:
    """Codes of a matrix, or of a stack of them, as their ``unpacked`` quantizer lays them down, and that quantizer.

    Args:
        codes: uint8, ``quantizer.codes_shape`` of the matrix, or a stack of such.
        quantizer: What made them.
    """
    if (dim := packed_dim(quantizer)) is None:
        return codes, quantizer
    return unpack(codes, dim), quantizer.unpacked()


def two_a_byte(codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Codes of a matrix or of a stack, one a byte, as a quantizer lays them down; as they are, if it packs none."""
    return codes if (dim := packed_dim(quantizer)) is None else pack(codes, dim)


def are_same_codes(one: Quantizer | None, other: Quantizer | None) -> bool:
    """Whether two quantizers make the same codes, however many of them share a byte."""
    if one is None or other is None:
        return one is other
    return one == other or (one.unpacked() or one) == (other.unpacked() or other)


@cache
def with_a_code_a_byte(recipe: Recipe) -> Recipe:
    """A recipe whose quantizers of one level are their ``unpacked`` ones, for steps that may begin within a byte."""
    slots = {slot: getattr(recipe, slot) for gemm in GEMMS for slot in (gemm.a, gemm.b)}
    packs = {slot: each for slot, each in slots.items() if each is not None and not each.has_outer_scale()}
    changed = {slot: own for slot, each in packs.items() if (own := each.unpacked()) is not None and own != each}
    return replace(recipe, **changed) if changed else recipe
