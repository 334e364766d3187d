"""Raise an error on all ranks if one rank finds it, so that no rank waits for another forever.

When ranks exchange their numbers of rows, the rank that found an error sends `FOUND`, -1, instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["FOUND", "noted", "raise_on_all", "tried"]

FOUND = -1  # sent instead of a number of rows by a rank that found an error

WAITING = (
    "This error was raised between collectives of expert parallelism, so the other ranks wait for this one until "
    "it exits or their process group times out."
)


def tried(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Call ``function``; return (result, None), or (None, error) if it raises. While compiling, let it raise."""
    if torch.compiler.is_compiling():
        return function(*args), None
    try:
        return function(*args), None
    except Exception as error:
        return None, error


@contextmanager
def noted() -> Iterator[None]:
    """Context that adds a note to errors raised inside it: that the other ranks wait for this rank."""
    try:
        yield
    except Exception as error:
        error.add_note(WAITING)
        raise


def raise_on_all(function: str, error: Exception | None, group: str) -> None:
    """Exchange all ranks' errors; raise the error if every rank has the same, else a RuntimeError with all texts.

    All ranks call this once they know that one has an error; ``error`` is this rank's error, or None.
    """
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]  # names are a type of their own since 2.13
    found: list[str | None] = [None] * ranks.size()
    dist.all_gather_object(found, None if error is None else f"{type(error).__name__}: {error}", group=ranks)
    if error is not None and len({*found}) == 1:
        raise error
    texts = [f"rank {dist.get_global_rank(ranks, index)}: {text}" for index, text in enumerate(found) if text]
    raise RuntimeError(
        f"{function}: {len(texts)} of {len(found)} ranks found an error before sending any rows, so all ranks stop. "
        f"{' | '.join(texts)}"
    ) from error
