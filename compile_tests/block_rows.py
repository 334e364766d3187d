"""Rows of the table of kernels and bytes, each made once in a process: Inductor takes seconds to write the code."""

from __future__ import annotations

from functools import cache

from benchmarks.blocks import SHAPES
from benchmarks.kernels import Row, kernel_row

__all__ = ["LLAMA", "TOKENS", "row_of"]

TOKENS, LLAMA = 8192, SHAPES["llama3-8b"]


@cache
def row_of(contender: str, kind: str = "mlp") -> Row:
    """Kernels, GEMMs and bytes of a contender of `benchmarks.blocks`; ``kind`` is "mlp" or "attention"."""
    return kernel_row(contender, TOKENS, LLAMA, kind)
