"""Quantizers that follow from another one, made once: each new one is checked field by field, in every eager call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fp8compile.quantizers.blocks import Block
from fp8compile.quantizers.quantizer import Quantizer

__all__ = ["transposed", "with_block"]


@lru_cache(maxsize=256)
def transposed(quantizer: Quantizer) -> Quantizer:
    """What ``quantizer.transposed()`` returns."""
    return quantizer.transposed()


@lru_cache(maxsize=256)
def with_block(quantizer: Quantizer, block: Block) -> Quantizer:
    """The same quantizer with another block."""
    return replace(quantizer, block=block)
