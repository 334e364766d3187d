"""Processes that tests start: each is forked from one that has imported the package and what compiles, for seconds.

The process that is forked starts together with the first of them and keeps the environment of that moment. It has
imported nothing else, and computed nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import multiprocessing

__all__ = ["print_to", "process_context"]

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


def print_to(path: Path) -> None:
    """Have this process, and those that it starts, print to a file from now on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
