"""accelerate and the Trainer on a machine without GPUs, where they shard nothing: FSDP2 needs an accelerator there.

A program for GPUs needs nothing of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType


@contextmanager
def told_to_shard() -> Iterator[None]:
    """Tell accelerate that the ranks of this run have GPUs, if there are ranks and they have none."""
    if torch.cuda.is_available() or not dist.is_initialized():
        yield
        return

    def init(self: PartialState, *args: object, **options: object) -> None:
        real(self, *args, **options)
        self.distributed_type = DistributedType.MULTI_GPU

    real, PartialState.__init__ = PartialState.__init__, init
    try:
        yield
    finally:
        PartialState.__init__ = real


def of_first_rank(folder: str) -> str:
    """The first rank's folder, which all ranks then write to."""
    every = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(every)
    return every[0]
