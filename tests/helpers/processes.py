"""Processes that tests start: each is forked from one that has imported the package and what compiles, for seconds.

The process that is forked starts together with the first of them and keeps the environment of that moment. It has
imported nothing else, and computed nothing.
"""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cheap_compiles import make_compiles_cheap
from torch import multiprocessing

__all__ = ["fake_rank", "print_to", "process_context"]

PRELOADED = [
    "fp8compile",
    "fp8compile.parallel",
    "fp8compile.testing",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
]


def process_context() -> Any:
    """What `multiprocessing.get_context` gives, to make a Process, a Pipe or a ProcessPoolExecutor with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def fake_rank(rank: int, world_size: int) -> ProcessPoolExecutor:
    """A process that is one rank of a group of which no other is there: what it sends can be counted."""
    return ProcessPoolExecutor(
        1, mp_context=process_context(), initializer=_join_fake_group, initargs=(rank, world_size)
    )


def _join_fake_group(rank, world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    make_compiles_cheap()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def print_to(path: Path) -> None:
    """Have this process, and those that it starts, print to a file from now on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
