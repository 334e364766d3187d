"""Calls of a user's quantizer, with checks of the type, shape and dtype of what its methods return.

The checks read metadata only. They are skipped for this package's own classes, because they slow down eager calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8compile.quantizers import Quantizer

__all__ = ["could_be", "dtype_said", "is_own", "returned", "shape_said"]

PACKAGE = __name__.partition(".")[0]


@cache
def is_own(cls: type[Quantizer]) -> bool:
    """Whether a quantizer's class and all its base quantizers are defined in this package."""
    return all(base.__module__.partition(".")[0] == PACKAGE for base in cls.__mro__ if issubclass(base, Quantizer))


def could_be(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two shapes may be equal: same number of dims, and equal sizes wherever both are ints."""
    if len(found) != len(expected):
        return False
    return not any(type(a) is type(b) is int and a != b for a, b in zip(found, expected, strict=True))


def returned(
    found: Any, quantizer: Quantizer, step: str, shape: Sequence[int], dtype: torch.dtype, shape_of: str
) -> Tensor:
    """Return ``found``, the result of a quantizer's method ``step``, after a check.

    ``shape`` and ``dtype`` are what is expected. ``shape_of`` tells in the error where the shape comes from.

    Raises:
        TypeError: The result is not a tensor of this shape and dtype.
    """
    if type(found) is Tensor and found.dtype == dtype and found.shape == shape:
        return found  # fast path of eager mode, where the sizes of a plain tensor are ints
    if isinstance(found, Tensor) and found.dtype == dtype and could_be(found.shape, shape):
        return found
    shown = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise TypeError(
        f"{type(quantizer).__name__}.{step} returned {shown.removeprefix('torch.')}; it must return "
        f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}, {shape_of}."
    )


def shape_said(quantizer: Quantizer, method: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Call a quantizer's ``method``, such as ``"codes_shape"``, with ``shape``; return the result as a tuple.

    Raises:
        TypeError: The result is not a sequence of ints.
    """
    found = getattr(quantizer, method)(shape)
    if type(found) is tuple and len(found) == 2 and type(found[0]) is type(found[1]) is int:
        return found  # fast path: an eager call comes here six times
    if isinstance(found, (tuple, Sequence)) and all(isinstance(size, (int, torch.SymInt)) for size in found):
        return tuple(found)
    raise TypeError(
        f"{type(quantizer).__name__}.{method} returned {found!r} for shape {tuple(shape)}; it must return a tuple of "
        "ints, one size per dim, such as (4, 8)."
    )


def dtype_said(quantizer: Quantizer) -> torch.dtype:
    """Return the dtype of a quantizer's scales; raise a TypeError if ``scale_dtype()`` returns no dtype."""
    found = quantizer.scale_dtype()
    if isinstance(found, torch.dtype):
        return found
    raise TypeError(
        f"{type(quantizer).__name__}.scale_dtype returned {found!r}; it must return a torch.dtype, such as "
        "torch.uint8."
    )
