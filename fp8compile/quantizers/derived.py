"""Quantizers derived from another one, cached because the constructor's checks would slow down each eager call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fp8compile.quantizers.blocks import Block
from fp8compile.quantizers.quantizer import Quantizer

__all__ = ["transposed", "with_block"]


@lru_cache(maxsize=256)
def transposed(quantizer: Quantizer) -> Quantizer:
    """The result of ``quantizer.transposed()``, cached."""
    return quantizer.transposed()


def with_block(quantizer: Quantizer, block: Block) -> Quantizer:
    """The same quantizer with another block."""
    try:
        return _with_block(quantizer, block)
    except TypeError:  # symbols for sizes have no hash
        return replace(quantizer, block=block)


@lru_cache(maxsize=256)
def _with_block(quantizer: Quantizer, block: Block) -> Quantizer:
    return replace(quantizer, block=block)
