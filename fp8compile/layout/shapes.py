"""Shapes of codes and scales of a weight: a matrix, or E stacked matrices (experts).

weight       codes                      scale                        outer scale (two levels only)
(N, K)       quantizer.codes_shape      quantizer.scale_shape        (1,)
(E, N, K)    (E, *codes of a matrix)    (E, *scale of a matrix)      (E,)
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8compile.quantizers import Quantizer

__all__ = ["codes_shape", "scale_shape", "scale_shapes", "values_shape"]


def codes_shape(size: Sequence[int], quantizer: Quantizer) -> tuple[int, ...]:
    """Return the shape of the codes of a weight with the shape ``size``, (N, K) or (E, N, K)."""
    return (*size[:-2], *quantizer.codes_shape(size[-2:]))


def values_shape(codes: Sequence[int], quantizer: Quantizer) -> tuple[int, ...]:
    """Return the shape of a weight with codes of the shape ``codes``; the two differ if codes are packed."""
    return (*codes[:-2], *quantizer.values_shape(codes[-2:]))


def scale_shape(size: Sequence[int], quantizer: Quantizer) -> tuple[int, ...]:
    """Return the shape of the block scales of a weight with the shape ``size``, (N, K) or (E, N, K)."""
    return (*size[:-2], *quantizer.scale_shape(size[-2:]))


def scale_shapes(size: Sequence[int], quantizer: Quantizer) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the block scales and, with two levels, outer scales of a weight of the shape ``size``."""
    blocks = scale_shape(size, quantizer)
    return (blocks, tuple(size[:-2]) or (1,)) if quantizer.has_outer_scale() else (blocks,)
