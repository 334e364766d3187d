"""Checks of what a quantizer's step returned, before anything builds on it: a tensor, its shape, its dtype.

A quantizer is the code of others, and what it returns by mistake would surface as an error of a kernel that knows
nothing of it, or not at all. A look at metadata costs no kernel, no sync and no node in a graph; of sizes that are
symbols nothing is asked, so that no guard comes of it. An eager call has no time to look at what our own classes
return, which the contract tests hold: kernels ask `is_own` first.
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
    """Whether a quantizer's class is this package's, with all that it inherits."""
    return all(base.__module__.partition(".")[0] == PACKAGE for base in cls.__mro__ if issubclass(base, Quantizer))


def could_be(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two shapes are equal, as far as numbers tell."""
    if len(found) != len(expected):
        return False
    return not any(type(a) is type(b) is int and a != b for a, b in zip(found, expected, strict=True))


def returned(
    found: Any, quantizer: Quantizer, step: str, shape: Sequence[int], dtype: torch.dtype, shape_of: str
) -> Tensor:
    """Return a step's result, after checking its type, shape and dtype.

    Args:
        found: What it returned.
        quantizer: The quantizer whose step returned it.
        step: Its name.
        shape: What it returns.
        dtype: Dtype that the result should have.
        shape_of: Where the shape is from, for the error.

    Raises:
        TypeError: It is something else.
    """
    if type(found) is Tensor and found.dtype == dtype and found.shape == shape:
        return found  # nearly always in eager mode, where the sizes of a plain tensor are numbers
    if isinstance(found, Tensor) and found.dtype == dtype and could_be(found.shape, shape):
        return found
    shown = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise TypeError(
        f"{type(quantizer).__name__}.{step} returned {shown.removeprefix('torch.')}; it returns "
        f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}, {shape_of}."
    )


def shape_said(quantizer: Quantizer, method: str, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that a method of a quantizer returns, checked.

    Args:
        quantizer: The quantizer.
        method: ``"codes_shape"``, ``"values_shape"`` or ``"scale_shape"``.
        shape: What it is given.

    Raises:
        TypeError: It gives none.
    """
    found = getattr(quantizer, method)(shape)
    if type(found) is tuple and len(found) == 2 and type(found[0]) is type(found[1]) is int:
        return found  # nearly always, and an eager call asks six times
    if isinstance(found, (tuple, Sequence)) and all(isinstance(size, (int, torch.SymInt)) for size in found):
        return tuple(found)
    raise TypeError(
        f"{type(quantizer).__name__}.{method} returned {found!r} for shape {tuple(shape)}; it returns a tuple of ints."
    )


def dtype_said(quantizer: Quantizer) -> torch.dtype:
    """The dtype of a quantizer's scales, checked.

    Raises:
        TypeError: It says none.
    """
    found = quantizer.scale_dtype()
    if isinstance(found, torch.dtype):
        return found
    raise TypeError(
        f"{type(quantizer).__name__}.scale_dtype returned {found!r}; it returns a torch.dtype, such as torch.uint8."
    )
