"""Comparison of tensors bit for bit."""

from fp8compile.testing.bits.compare import bits, difference, results, sum_difference

__all__ = ["bits", "difference", "results", "sum_difference"]
