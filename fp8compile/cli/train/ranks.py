"""The processes of a run: one, or those that torchrun started, each a rank (layout.py has who does what).

Every rank runs the same program. What only one may do (read rows, write files, print) the first one does, and tells
the others; what all have to do in the same turn (stop) they agree on. Of ranks that fail, the first one says why.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from fp8compile.cli.errors import Quiet, Stopped, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store

__all__ = ["Ranks", "joined"]

T = TypeVar("T")
RENDEZVOUS = ("RANK", "MASTER_ADDR", "MASTER_PORT")
FAILED, SAID = "fp8compile/failed", "fp8compile/said"  # keys of the store that all ranks see
# As long as a rank that fails too waits for the first one to say why, before its end makes torchrun end all.
PATIENCE = timedelta(seconds=10)


class Ranks:
    """This process among those of the run.

    Attributes:
        rank: Its number.
        size: How many there are.
    """

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        """Be one process on its own, unless told otherwise; see :func:`joined`."""
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and prints."""
        return self.rank == 0

    def same(self, make: Callable[[], T]) -> T:
        """Return on every rank what the first one makes.

        Args:
            make: Called on the first rank alone.

        Raises:
            UserError: ``make`` raised it.
        """
        if self.size == 1:
            return make()
        told: list[object] = [None, None]
        if self.is_first:
            try:
                told[0] = make()
            except UserError as error:
                told[1] = str(error)
        torch.distributed.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise UserError(told[1])
        return told[0]

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the ranks give."""
        if self.size == 1:
            return number
        numbers = torch.tensor(number)
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
        return int(numbers)

    def all(self, number: float) -> list[float]:
        """Return the numbers that the ranks give, in their order."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros((), dtype=torch.float64) for _ in range(self.size)]
        torch.distributed.all_gather(numbers, torch.tensor(number, dtype=torch.float64))
        return [each.item() for each in numbers]


def _world_size() -> int:
    given = os.environ.get("WORLD_SIZE", "1")
    if not (given.isdecimal() and int(given) > 0):
        raise UserError(f"WORLD_SIZE is {given!r}; it is the number of processes, which torchrun sets")
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if int(given) > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {given}, and {', '.join(missing)} not set; torchrun sets them all: start by it, or unset "
            "WORLD_SIZE"
        )
    return int(given)


def _quiet_unless_first(store: Store, error: BaseException) -> None:
    """Return on the first rank that fails; raise on the others, once it has said why."""
    # Where the store is gone, so is the rank that had it, which said why.
    with suppress(torch.distributed.DistError):
        if store.add(FAILED, 1) == 1:
            atexit.register(store.set, SAID, "")  # what is raised is printed by then
            return
        store.wait([SAID], PATIENCE)
    code = error.exit_code if isinstance(error, Stopped) else 2 if isinstance(error, UserError) else 1
    raise Quiet(exit_code=code) from error


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes that torchrun started, if it did; ranks but the first print nothing meanwhile.

    Yields:
        This process among them.

    Raises:
        UserError: The environment has half of what torchrun sets.
        Quiet: On all ranks that fail but the first one.
    """
    if _world_size() == 1:
        yield Ranks()
        return
    store, rank, size = next(torch.distributed.rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if rank else sys.stdout):
            yield Ranks(rank=rank, size=size)
    except BaseException as error:
        _quiet_unless_first(store, error)
        raise
    torch.distributed.destroy_process_group()
