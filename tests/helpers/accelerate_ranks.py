"""accelerate in the ranks of a gloo group: on a CPU it shards nothing, so it is told that they have GPUs."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["sharding_ranks", "without_state"]


def _forget():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@contextmanager
def without_state():
    """What accelerate keeps for the process, and writes to the environment, ends with the block."""
    before = dict(os.environ)
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def sharding_ranks():
    """What accelerate finds: the ranks of this group, as if they had GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def init(self, *args, **options):
        real(self, *args, **options)
        self.distributed_type = DistributedType.MULTI_GPU

    rank, size = dist.get_rank(), dist.get_world_size()
    with without_state():
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        os.environ |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # which nobody asks: the group is there
        real, PartialState.__init__ = PartialState.__init__, init
        try:
            yield
        finally:
            PartialState.__init__ = real
