"""fp8compile::count_cast: count the underflows and the saturations in each row of a cast.

Underflows are nonzero values with code 0. One integer holds both counts, so that counting adds only one reduction to
the cast. The op has its own Inductor lowering; without it Inductor would write each element's count to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import inductor
from fp8compile.ops.registry import register_op

__all__ = ["count_cast", "half_of", "in_halves"]


def _dtype(size: Any) -> torch.dtype:
    """Return the smallest of int16, int32 and int64 whose halves can count to ``size``; int64 for a symbolic size."""
    if not isinstance(size, int):
        return torch.int64
    return torch.int16 if size < 1 << 8 else torch.int32 if size < 1 << 16 else torch.int64


def _shift(dtype: torch.dtype) -> int:
    return dtype.itemsize * 4


def half_of(counts: Tensor, half: int) -> Tensor:
    """Return one count, int64, from a result of `count_cast`: underflows (``half`` 0) or saturations (1)."""
    shift = _shift(counts.dtype)
    return (counts.long() >> shift * half) & ((1 << shift) - 1)


def in_halves(underflows: Tensor, saturations: Tensor) -> Tensor:
    """Pack two counts into one int64, as `count_cast` does: underflows in the lower half, saturations in the upper."""
    return underflows.long() + (saturations.long() << _shift(torch.int64))


def _impl(magnitude: Tensor, codes: Tensor, limit: Tensor, mask: int) -> Tensor:
    """Count the values of each row that a cast rounds to 0, and the values that it saturates.

    Args:
        magnitude: Magnitudes of the values, (..., n) float32.
        codes: Codes of the values, (..., n) uint8.
        limit: The largest magnitude that does not saturate, float32; it broadcasts against the magnitudes.
        mask: Bit mask of a code's magnitude, without its sign bit.

    Returns:
        One integer per row, (...): its lower half counts nonzero values with code 0, its upper half magnitudes above
        the limit. The integer has 16 bits if n < 256, 32 if n < 65536, else 64.
    """
    dtype = _dtype(magnitude.shape[-1])
    underflow = ((codes & mask) == 0) & (magnitude > 0)
    both = underflow.to(dtype) + ((magnitude > limit).to(dtype) << _shift(dtype))
    return both.sum(-1, dtype=dtype)


def _fake(magnitude: Tensor, codes: Tensor, limit: Tensor, mask: int) -> Tensor:
    return magnitude.new_empty(magnitude.shape[:-1], dtype=_dtype(magnitude.shape[-1]))


def _lower(magnitude: Any, codes: Any, limit: Any, mask: int) -> Any:
    size = magnitude.get_size()[-1]
    dtype = _dtype(int(size) if getattr(size, "is_Integer", isinstance(size, int)) else None)
    return inductor.lower_counts_of_rows(magnitude, codes, limit, mask, dtype, _shift(dtype))


def _samples() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 32), (3, 4, 300), (2, 70000), (0, 16)):
        magnitude = torch.randn(shape, generator=generator).abs()
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0x83
        for limit in (torch.full((*shape[:-1], 1), 0.5), magnitude.roll(1, -1)):
            yield magnitude, codes, limit, 0x7F
            yield magnitude.where(magnitude < 2, torch.nan), codes.mT.contiguous().mT, limit, 0x07


count_cast: OpOverload = register_op(
    "fp8compile::count_cast",
    _impl,
    fake=_fake,
    backward=None,
    decompose=None,  # it has a lowering instead
    sharding=None,  # of one rank, whose elements they are
    samples=_samples,
)
inductor.register_lowering(count_cast, _lower)
