"""`fp8compile explain --tp N`: this process as the first of N ranks, of which there are no others.

A fake process group takes every message and sends none, so the plan of a model is applied, traced and run as on N
ranks. The numbers of such a run mean nothing; what is sent, and in what each GEMM runs, does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from fp8compile import _compat
from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from fp8compile.cli.explain.target import Target

__all__ = ["parallelized", "pretended_ranks"]


@contextmanager
def pretended_ranks(size: int | None, *, sp: bool) -> Iterator[None]:
    """A fake process group while this runs.

    Args:
        size: Ranks; None starts no group.
        sp: Whether ``--sp`` was given.

    Raises:
        UserError: Flags that don't fit, or a group that is there already.
    """
    if size is None:
        if sp:
            raise UserError("--sp cuts the sequence over the ranks of --tp; add --tp 2, or more")
        yield
        return
    if size < 2:
        raise UserError(f"--tp {size}: a model is cut over 2 ranks or more")
    if dist.is_initialized():
        raise UserError("--tp pretends ranks in a process on its own; this one is in a process group already")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def parallelized(target: Target, size: int, *, sp: bool) -> None:
    """See to it that the model is spread over the ranks: by its own plan, or by that of ``fp8compile train``.

    Args:
        target: Whose model is looked at, and changed in place if it is the one of ``train``.
        size: Ranks.
        sp: Whether its sequence is cut, too.

    Raises:
        UserError: It is neither.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from fp8compile.cli.train.model import ByteLlama
    from fp8compile.cli.train.tensor_parallel import parallelize

    is_spread = any(map(_compat.is_dtensor, target.model.parameters()))
    if isinstance(target.model, ByteLlama) and not is_spread:
        parallelize(target.model, init_device_mesh("cpu", (size,)), sp=sp)
        return
    if sp:
        raise UserError(
            f"--sp is for the model of train; {target.name} says by its own plan what is cut. Leave it out"
        )
    if not is_spread:
        raise UserError(
            f"--tp {size}: no parameter of {target.name} is a DTensor; apply the plan there, as for {size} ranks: "
            f"parallelize_module(model, init_device_mesh('cpu', ({size},)), plan)"
        )
