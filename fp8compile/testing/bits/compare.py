"""Describes how two tensors differ: bitwise, or beyond a tolerance for reordered sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bits", "difference", "results", "sum_difference"]

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bits of each element of a tensor as an integer; all NaN get the same integer."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(WIDTHS[tensor.element_size()])


def results(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """An operator's results as a tuple, which has one entry if the operator returned a single tensor."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """Describe how two tensors differ in dtype, shape or bits. All NaN count as equal.

    Args:
        actual: The tensor to check.
        expected: The tensor that it should equal.

    Returns:
        A description of the first difference; None if there is none.
    """
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype} instead of {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    unlike = bits(actual) != bits(expected)
    if not unlike.any():
        return None
    first = tuple(unlike.nonzero()[0].tolist())
    return (
        f"{int(unlike.sum())} of {unlike.numel()} elements differ, the first at {list(first)}: "
        f"{actual[first].item()!r} instead of {expected[first].item()!r}"
    )


def sum_difference(actual: Tensor, expected: Tensor) -> str | None:
    """Describe how tensors differ; None if by at most 8 roundings of the largest element.

    This tolerates reordered sums: a backend chooses a GEMM's order of additions by its sizes, and Inductor chooses the
    order of a plain sum.
    """
    differs = difference(actual, expected)
    alike = (actual.dtype, actual.shape) == (expected.dtype, expected.shape) and actual.is_floating_point()
    if differs is None or not alike or (actual.isfinite() != expected.isfinite()).any():
        return differs
    finite = expected.isfinite()
    apart = (actual[finite].double() - expected[finite].double()).abs()
    allowed = 8 * torch.finfo(actual.dtype).eps * expected[finite].double().abs().max() if finite.any() else 0.0
    return differs if (apart > allowed).any() else None
