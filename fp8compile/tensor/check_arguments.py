"""Checks of callers' arguments that several functions share, and the texts of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import _compat

__all__ = ["SOURCE_DTYPES", "allow_groups", "checked_sizes", "group_name", "not_dense", "own_sizes", "shown"]

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@_compat.constant_when_traced
def shown(value: object) -> str:
    """Return the repr of a wrong value, for an error's text."""
    return repr(value)


@_compat.constant_when_traced
def allow_groups() -> None:
    """Let compiled code use a QuantizedTensor with a process group; raise a RuntimeError on PyTorch 2.11."""
    if not _compat.allow_group_in_subclass():
        raise RuntimeError(
            f"a process group on a QuantizedTensor requires PyTorch 2.12 or later, this is {torch.__version__}. "
            "Upgrade PyTorch, or quantize without group=."
        )


def not_dense(x: Tensor) -> str | None:
    """Return why ``x`` is not dense, as the end of a sentence that begins "x ..."; None if it is dense."""
    if x.layout != torch.strided:
        return f"has layout {x.layout}"
    if x.is_nested:
        return "is a nested tensor"
    return None


def group_name(function: str, group: object) -> str | None:
    """Return the name of a process group, or None for None; otherwise raise a TypeError that names ``function``."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"{function}: a group must be a ProcessGroup, such as mesh.get_group(), got {shown(group)}.")
    return None if group is None else group.group_name


def checked_sizes(function: str, argument: str, given: Any, group: ProcessGroup) -> tuple[int, ...]:
    """Check an argument that gives the size of each rank's shard, and return it as a tuple.

    ``function`` and ``argument`` are the names of the called function and of its argument, for the error's text.

    Raises:
        TypeError: ``given`` is not a sequence of ints, each 0 or more.
        ValueError: ``given`` does not have one entry for each rank of ``group``.
    """
    if not isinstance(given, Sequence) or not all(type(size) is int and size >= 0 for size in given):
        raise TypeError(
            f"{function}: `{argument}` must be a tuple of an int of at least 0 per rank, got {shown(given)}."
        )
    if len(given) != group.size():
        raise ValueError(
            f"{function}: `{argument}` must have an entry for each of {group.size()} ranks, got {tuple(given)}."
        )
    return tuple(given)


def own_sizes(function: str, argument: str, given: Any, group: ProcessGroup, own: int, what: str) -> tuple[int, ...]:
    """Check and return the sizes of all ranks' shards of a tensor.

    Args:
        function: Name of the called function, for the error's text.
        argument: Name of the function's argument that is checked, for the error's text.
        given: The argument: a size for each rank; None if all ranks have as much as this rank.
        group: The ranks.
        own: Size of this rank's shard; this rank's entry of ``given`` must equal it.
        what: What the sizes count, such as "rows", for the error's text.
    """
    if given is None:
        return (own,) * group.size()
    sizes = checked_sizes(function, argument, given, group)
    if sizes[group.rank()] != own:
        raise ValueError(
            f"{function}: `{argument}` is {sizes}, but {what} on rank {group.rank()} are {own}. Pass the sizes of "
            "all ranks, the same on all of them."
        )
    return sizes
