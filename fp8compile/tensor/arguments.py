"""What callers of this package hand over: the checks that several functions make, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import _compat

__all__ = ["SOURCE_DTYPES", "checked_sizes", "not_dense", "own_sizes", "shown"]

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@_compat.constant_when_traced
def shown(value: object) -> str:
    """What an error says of a wrong value: its repr."""
    return repr(value)


def not_dense(x: Tensor) -> str | None:
    """What keeps a tensor from being a plain dense one, in words, or None."""
    if x.layout != torch.strided:
        return f"has layout {x.layout}"
    if x.is_nested:
        return "is a nested tensor"
    return None


def checked_sizes(function: str, argument: str, given: Any, group: ProcessGroup) -> tuple[int, ...]:
    """What a caller says that each rank of a group has; in the words of ``function``, whose argument it is.

    Raises:
        TypeError: It is no sequence of ints.
        ValueError: It has not one entry for each rank.
    """
    if not isinstance(given, Sequence) or not all(type(size) is int and size >= 0 for size in given):
        raise TypeError(f"{function}: {argument} is {shown(given)}; it is a tuple of ints from 0, one for each rank.")
    if len(given) != group.size():
        raise ValueError(
            f"{function}: {argument} is {tuple(given)}; it has one entry for each of {group.size()} ranks."
        )
    return tuple(given)


def own_sizes(function: str, argument: str, given: Any, group: ProcessGroup, own: int, what: str) -> tuple[int, ...]:
    """What each rank has, where this one's part is known: as much as this one if nothing is given.

    Raises:
        TypeError: As ``checked_sizes``.
        ValueError: As ``checked_sizes``, or this rank has something else; ``what`` names that.
    """
    if given is None:
        return (own,) * group.size()
    sizes = checked_sizes(function, argument, given, group)
    if sizes[group.rank()] != own:
        raise ValueError(
            f"{function}: {argument} is {sizes} and {what} on rank {group.rank()} are {own}; give what each rank has, "
            "the same on all of them."
        )
    return sizes
