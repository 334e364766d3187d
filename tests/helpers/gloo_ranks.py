"""Processes of one gloo group that stay up for many tests: starting four costs more than what most tests do.

    test --(function, arguments)--> pipe --> rank 0..3: function(*arguments) --(value or traceback)--> pipe --> test

What is sent either way are plain values, never tensors: ranks compare bits themselves.
"""

from __future__ import annotations

import atexit
import time
import traceback
from functools import cache
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from cheap_compiles import make_compiles_cheap
from processes import process_context
from torch.distributed import distributed_c10d

__all__ = ["GROUPS", "MEMBERS", "Ranks", "shared_ranks"]

WORLD_SIZE = 4
# what each group is called, and its ranks; a rank knows the ones it is in
MEMBERS = {"pair": ([0, 1], [2, 3]), "cross": ([0, 2], [1, 3]), "three": ([0, 1, 2],), "all": ([0, 1, 2, 3],)}
GROUPS: dict[str, dist.ProcessGroup] = {}  # in a rank: its groups


def _make_groups(rank):
    for name, all_members in MEMBERS.items():
        for members in all_members:
            group = dist.new_group(members)
            if rank in members:
                GROUPS[name] = group


class _GlooOnOneDevice(type):
    """Stands for ``ProcessGroupGloo``, and has all groups of a process send by one device.

    By default each group has a device of its own, whose thread wakes up a hundred times a second for as long as the
    group lives. The meshes that tests leave behind so took a fifth of two cores.
    """

    gloo = distributed_c10d.ProcessGroupGloo

    def __call__(cls, store, rank, size, timeout, enable_reconfigure=False):
        assert not enable_reconfigure, "options of a device do not have it"  # PyTorch 2.15 gives it as False
        options = cls.gloo._Options()
        options._devices, options._timeout = [_device()], timeout
        return cls.gloo(store, rank, size, options)

    def __instancecheck__(cls, group):
        return isinstance(group, cls.gloo)


@cache
def _device():
    return _GlooOnOneDevice.gloo.create_default_device()


def _serve(rank, port, pipe):
    torch.set_num_threads(1)
    make_compiles_cheap()
    distributed_c10d.ProcessGroupGloo = _GlooOnOneDevice("ProcessGroupGloo", (), {})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    _make_groups(rank)
    pipe.send((True, "ready"))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        except Exception:
            pipe.send((False, traceback.format_exc()))
            continue
        if message is None:
            break
        function, arguments = message
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """Four processes and their groups ``pair`` (0 1, 2 3), ``cross`` (0 2, 1 3), ``three`` (0 1 2) and ``all``."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._pipes: list[Connection] = []
        self._processes: list = []

    def _start(self):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
        context = process_context()
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(range(WORLD_SIZE), seconds=180)

    def stop(self, *, kill: bool = False) -> None:
        """End the processes; the next ``run`` starts new ones."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(20)
            pipe.close()
        self._pipes, self._processes = [], []

    def _collect(self, members, seconds):
        """One answer of each of these ranks. Once one failed, the others, which may wait for it for ever, get 5 s."""
        answers: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(members) and time.monotonic() < deadline:
            waiting = [self._pipes[rank] for rank in members if rank not in answers]
            for pipe in wait(waiting, timeout=0.5):
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        missing = [rank for rank in members if rank not in answers]
        if failed or missing:
            if missing or "the process died" in failed.values():
                self.stop(kill=True)
            texts = [f"rank {rank}:\n{text}" for rank, text in sorted(failed.items())]
            raise AssertionError("\n".join([*texts, *(f"rank {rank}: no answer" for rank in missing)]))
        return [answers[rank][1] for rank in members]

    def run(self, function, *arguments, seconds: float = 240, within: str = "all") -> list:
        """``function(*arguments)`` on the ranks of the first group called ``within``, values in the order of ranks.

        Two ranks take half the time of four. A function that makes a mesh or group of its own needs all of them.

        Raises:
            AssertionError: A rank raised, died, or did not answer in time; with each failed rank's traceback.
        """
        if not self._processes:
            self._start()
        members = MEMBERS[within][0]
        for rank in members:
            self._pipes[rank].send((function, arguments))
        return self._collect(members, seconds)


@cache
def shared_ranks() -> Ranks:
    """The processes that all test modules of this pytest process share."""
    ranks = Ranks()
    atexit.register(ranks.stop)
    return ranks
