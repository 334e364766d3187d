"""Count the rows that this rank drops because the messages to experts on other ranks have a capacity.

The counter is a plain tensor attribute of the experts' module, on the device of its parameters. It is not a buffer,
because DistributedDataParallel would overwrite it with one rank's counter, and ``to_empty`` would leave it
uninitialized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8compile._compat import keep_address
from fp8compile.ops.exchange.overflow_counter import counted

__all__ = ["NAME", "count", "counter_of", "place_counter", "start_counting"]

NAME = "overflowed_rows"


def counter_of(module: nn.Module) -> Tensor | None:
    """Return a module's counter of dropped rows, () int64; None if messages have no capacity."""
    return vars(module).get(NAME)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters(recurse=False)).device


def start_counting(module: nn.Module) -> None:
    """Give a module of experts a counter of dropped rows, which starts at 0."""
    setattr(module, NAME, keep_address(torch.zeros((), dtype=torch.int64, device=_device(module))))


def place_counter(module: nn.Module) -> None:
    """Move a module's counter, if any, to the device of its parameters; a counter on the meta device becomes 0."""
    counter = counter_of(module)
    if counter is None or counter.device == _device(module):
        return
    start_counting(module)
    if not counter.is_meta:
        getattr(module, NAME).copy_(counter)


def count(module: nn.Module, rows: Tensor) -> None:
    """Add ``rows``, () int64, to a module's counter, but not when activation checkpointing repeats a forward."""
    counter = getattr(module, NAME)
    counter.copy_(counted(counter, rows))
