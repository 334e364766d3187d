"""Whether there are process groups, and cache keys that differ between them."""

from __future__ import annotations

import hashlib

from torch import distributed

__all__ = ["has_process_groups", "rank_salt"]


def has_process_groups() -> bool:
    """Whether this process is a rank of torch.distributed's default process group."""
    return distributed.is_available() and distributed.is_initialized()


def rank_salt() -> str:
    """Return a text that makes compile cache keys differ between ranks and between process groups.

    A rank's graph contains where the rank's shard begins, and the names of process groups. AOTAutograd computes its
    cache key from an earlier graph that is equal on all ranks, and from meshes without these names: PyTorch 2.13 and
    2.15 run code of another rank, or of a run that made its groups in another order. Empty without torch.distributed.
    """
    if not has_process_groups():
        return ""
    world = distributed.distributed_c10d._world
    # A group may have thousands of ranks. Hashes of integers are fast, and the same in all processes.
    groups = sorted((name, hash(tuple(world.pg_group_ranks[group]))) for group, name in world.pg_names.items())
    return f"-{distributed.get_rank()}-{hashlib.sha256(repr(groups).encode()).hexdigest()[:8]}"
