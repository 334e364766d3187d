"""Ops as on a GPU that isn't there: their Triton kernels, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.program.arithmetic import Arithmetic
from fp8compile.testing.gpu.program.interpreter import Interpreter


@contextmanager
def on_a_gpu(order: str = "forwards") -> Iterator[None]:
    """Ops run their kernels, interpreted, in memory that is full of 255 before it is written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with pretend_target(GPUS["h200"].target), Interpreter(Arithmetic()).active(order):
            assert torch.empty(1, dtype=torch.uint8) == 255
            yield
    finally:
        torch.use_deterministic_algorithms(mode=before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
