"""The command on several ranks, without torchrun: forked from a process that has imported the package.

torchrun imports PyTorch itself and starts ranks that import it again, a quarter of a minute of processor time for two.
What torchrun does when a rank fails or a signal comes is tested with it.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from processes import print_to, process_context

from fp8compile.cli import main

__all__ = ["finished_on_ranks"]


def _serve(rank, size, port, folder, arguments):
    print_to(folder / f"rank-{rank}")
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=f"{port}")
    sys.exit(main(arguments))


def _free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def finished_on_ranks(arguments: list, folder: Path, *, size: int = 2) -> str:
    """``fp8compile ARGUMENTS`` on ``size`` ranks, which have to succeed; what they print, as torchrun passes it on."""
    folder.mkdir(exist_ok=True)
    context, port, words = process_context(), _free_port(), list(map(str, arguments))
    ranks = [context.Process(target=_serve, args=(rank, size, port, folder, words)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    printed = [(folder / f"rank-{rank}").read_text() for rank in range(size)]
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * size, f"exit codes {codes}\n" + "\n".join(printed)
    return "".join(printed)
