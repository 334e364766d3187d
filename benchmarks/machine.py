"""The machine that benchmarks run on: its GPU, its CPU, or a CPU that plays a GPU.

                 tensors on   compiles by                     a clock that
    Gpu          cuda         Inductor                        counts the GPU's time
    Cpu          cpu          Inductor                        counts this machine's time
    Rehearsal    cpu          the program for an H200, run    counts a millisecond a call, whatever is called
                              by Triton's interpreter

A rehearsal, `FP8COMPILE_REHEARSAL=program`, tries the scripts before there is a GPU. Its sizes are those of a CPU, its
contenders those of an H200, and its title says that its numbers mean nothing. `FP8COMPILE_REHEARSAL=eager` runs the
traced graphs operator by operator, which takes less time.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["Cpu", "Gpu", "Rehearsal", "machine"]

VARIABLE = "FP8COMPILE_REHEARSAL"
KINDS = ("program", "eager")


class Cpu:
    """A machine without a GPU, or whose GPU isn't asked."""

    device = "cpu"
    calls = 2  # a round, so that its time is well above the clock's and the launch's
    backend = "inductor"
    is_rehearsal = False

    def name(self) -> str:
        """For titles."""
        return "CPU"

    def target(self) -> AbstractContextManager:
        """While this runs, recipes are asked what they would do on the machine."""
        return nullcontext()

    def compile(self, model: nn.Module | Callable, *, dynamic: bool | None = None) -> Callable:
        """A module or function as one graph."""
        return torch.compile(model, fullgraph=True, dynamic=dynamic)

    def seconds(self) -> float:
        """The clock, after all work is done."""
        return time.perf_counter()

    def milliseconds(self, step: Callable[[], object], calls: int) -> float:
        """Milliseconds that one call takes, the mean of some."""
        began = self.seconds()
        for _ in range(calls):
            step()
        return (self.seconds() - began) * 1e3 / calls

    def forget_peak(self) -> None:
        """Begin to count memory anew."""

    def peak_bytes(self) -> float:
        """The most memory that was allocated; NaN where nobody counts it."""
        return float("nan")


class Gpu(Cpu):
    """A machine with a GPU."""

    device = "cuda"
    calls = 10

    def name(self) -> str:
        """That of the GPU."""
        return torch.cuda.get_device_name()

    def seconds(self) -> float:
        """The machine's clock, after the GPU is done."""
        torch.cuda.synchronize()
        return time.perf_counter()

    def milliseconds(self, step: Callable[[], object], calls: int) -> float:
        """By the GPU's own clock."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    def forget_peak(self) -> None:
        """Frees what nothing holds, too."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> float:
        """The most bytes of the GPU's memory that were allocated."""
        return torch.cuda.max_memory_allocated()


class Rehearsal(Cpu):
    """A CPU that plays an H200.

    Args:
        kind: ``"program"``: compiled functions run as the GPU's program; ``"eager"``: as traced graphs.

    Raises:
        ValueError: There is no such kind.
    """

    calls = 1
    backend = "aot_eager"
    is_rehearsal = True
    _ticks = itertools.count()

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"{VARIABLE} is {kind!r}; it is {' or '.join(map(repr, KINDS))}, or not set.")
        self._kind = kind

    def name(self) -> str:
        """Not that of a GPU."""
        return "a CPU that plays an H200"

    def target(self) -> AbstractContextManager:
        """That of an H200."""
        from fp8compile.target import pretend_target
        from fp8compile.testing.gpu.gpus import gpu_called

        return pretend_target(gpu_called("h200").target)

    def compile(self, model: nn.Module | Callable, *, dynamic: bool | None = None) -> Callable:
        """A module or function as the GPU's program, or as its graph."""
        if self._kind == "eager":
            return torch.compile(model, fullgraph=True, backend=self.backend, dynamic=dynamic)
        from fp8compile.testing.gpu.program.generate import GpuBackend, Settings

        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        compiled = GpuBackend(_settings(Settings), folder).compile(model)

        def call(*args: Any) -> Any:
            with self.target(), torch._dynamo.config.patch(automatic_dynamic_shapes=dynamic is not False):
                return compiled(*args)

        return call

    def seconds(self) -> float:
        """A millisecond more each time that somebody asks."""
        return next(self._ticks) / 1e3

    def milliseconds(self, step: Callable[[], object], calls: int) -> float:
        """One, after a call."""
        step()
        return 1.0


def _settings(settings: type) -> Any:
    from fp8compile.testing.gpu.gpus import gpu_called
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic

    return settings(
        gpu=gpu_called("h200"), precision_casts=False, arithmetic=Arithmetic(), poison=255, orders=("forwards",),
        configurations=None, templates=(),
    )  # fmt: skip


def machine() -> Cpu:
    """The machine at hand, or the rehearsal that the environment asks for."""
    if kind := os.environ.get(VARIABLE):
        return Rehearsal(kind)
    return Gpu() if torch.cuda.is_available() else Cpu()
