"""Fake process group for `fp8compile explain --tp N`: this process is rank 0 of N, and no other rank exists.

The group accepts every message and sends none, so a model is parallelized, traced and run as on N ranks.
The computed values are meaningless; the messages and the formats of GEMMs are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from fp8compile import _compat
from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from fp8compile.cli.target import Target

__all__ = ["check_spread", "pretended_ranks"]


@contextmanager
def pretended_ranks(size: int | None) -> Iterator[None]:
    """Context with a fake process group of ``size`` ranks, in which this process is rank 0; None starts no group.

    Raises:
        UserError: There are fewer than 2 ranks, or this process is in a process group already.
    """
    if size is None:
        yield
        return
    if size < 2:
        raise UserError(f"--tp {size}: tensor parallelism requires at least 2 ranks, for example --tp 2.")
    if dist.is_initialized():
        raise UserError(
            "--tp simulates ranks in one process, but a process group is already initialized. Remove the call of "
            "init_process_group from the file of TARGET."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_spread(target: Target, size: int) -> None:
    """Raise a `UserError` if no parameter of the model is a DTensor: nothing is tensor-parallel then."""
    if not any(map(_compat.is_dtensor, target.model.parameters())):
        raise UserError(
            f"--tp {size}: no parameter of {target.name} is a DTensor. Apply the plan in that function, as for {size} "
            f"ranks: parallelize_module(model, init_device_mesh('cpu', ({size},)), plan)."
        )
