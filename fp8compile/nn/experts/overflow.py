"""Counters of the rows that did not fit into the messages of a module of experts, on this rank so far.

The counter is no buffer: DistributedDataParallel would send one rank's to all, ``to_empty`` would leave in it what
memory held. It is a tensor of the module beside them, on the device of its parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8compile._compat import keep_address
from fp8compile.ops.exchange.counted import counted

__all__ = ["NAME", "count", "counter_of", "place_counter", "start_counting"]

NAME = "overflowed_rows"


def counter_of(module: nn.Module) -> Tensor | None:
    """The counter, () int64; None for a module whose messages have no capacity."""
    return vars(module).get(NAME)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters(recurse=False)).device


def start_counting(module: nn.Module) -> None:
    """Give a module a counter, at 0."""
    setattr(module, NAME, keep_address(torch.zeros((), dtype=torch.int64, device=_device(module))))


def place_counter(module: nn.Module) -> None:
    """Move a module's counter, if it has one, to the device of its parameters; it is 0 after the meta device."""
    counter = counter_of(module)
    if counter is None or counter.device == _device(module):
        return
    start_counting(module)
    if not counter.is_meta:
        getattr(module, NAME).copy_(counter)


def count(module: nn.Module, rows: Tensor) -> None:
    """Add rows to the counter; a forward that checkpointing repeats adds none.

    Args:
        module: The module of experts.
        rows: (), int64.
    """
    counter = getattr(module, NAME)
    counter.copy_(counted(counter, rows))
