"""Count this rank's rows that did not fit into the messages of a module of experts.

The counter is a plain tensor attribute of the module, on the device of its parameters. It is not a buffer, because
DistributedDataParallel would overwrite it with one rank's counter, and ``to_empty`` would leave it uninitialized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8compile._compat import keep_address
from fp8compile.ops.exchange.overflow_counter import counted

__all__ = ["NAME", "count", "counter_of", "place_counter", "start_counting"]

NAME = "overflowed_rows"


def counter_of(module: nn.Module) -> Tensor | None:
    """Return a module's counter of rows that did not fit, () int64; None if messages have no capacity."""
    return vars(module).get(NAME)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters(recurse=False)).device


def start_counting(module: nn.Module) -> None:
    """Give a module of experts a counter of rows that did not fit, which starts at 0."""
    setattr(module, NAME, keep_address(torch.zeros((), dtype=torch.int64, device=_device(module))))


def place_counter(module: nn.Module) -> None:
    """Move a module's counter, if any, to the device of the module's parameters.

    A counter on the meta device becomes 0.
    """
    counter = counter_of(module)
    if counter is None or counter.device == _device(module):
        return
    start_counting(module)
    if not counter.is_meta:
        getattr(module, NAME).copy_(counter)


def count(module: nn.Module, rows: Tensor) -> None:
    """Add ``rows``, a number of rows as () int64, to a module's counter.

    A forward that checkpointing repeats adds nothing.
    """
    counter = getattr(module, NAME)
    counter.copy_(counted(counter, rows))
