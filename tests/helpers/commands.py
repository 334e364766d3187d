"""A command in processes that are forked from one which has imported the package, on one rank or several.

A process of its own imports PyTorch, torchrun and its ranks all do: 3 to 4 seconds of processor time each. What
torchrun does when a rank fails or a signal comes is tested with it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cheap_compiles import make_compiles_cheap
from processes import print_to, process_context

from fp8compile import cli

__all__ = ["finished_on_ranks", "started"]


def _serve(main, arguments, printed, environment):
    print_to(printed)
    os.environ.update(environment)
    make_compiles_cheap()
    sys.exit(main(arguments))


def started(arguments: list, printed: Path, *, main: Callable[[list[str]], int] = cli.main, **environment: str) -> Any:
    """A process that runs a command, by default ``fp8compile``, and prints to a file, errors too."""
    process = process_context().Process(target=_serve, args=(main, list(map(str, arguments)), printed, environment))
    process.start()
    return process


def _free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def finished_on_ranks(main: Callable[[list[str]], int], arguments: list, folder: Path, *, size: int = 2) -> str:
    """A command on ``size`` ranks, which have to succeed; what they print, as torchrun passes it on."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"rank-{rank}" for rank in range(size)]
    meeting = {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{_free_port()}"}
    ranks = [
        started(arguments, file, main=main, RANK=f"{rank}", LOCAL_RANK=f"{rank}", **meeting)
        for rank, file in enumerate(files)
    ]
    for rank in ranks:
        rank.join(300)
    printed = [file.read_text() for file in files]
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * size, f"exit codes {codes}\n" + "\n".join(printed)
    return "".join(printed)
