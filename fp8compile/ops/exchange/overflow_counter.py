"""fp8compile::counted: return counter + more; only the counter while activation checkpointing repeats the forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op

__all__ = ["counted"]


def _kernel(counter: Tensor, more: Tensor) -> Tensor:
    found = counter if _compat.runs_in_backward() else counter + more
    return found.clone(memory_format=torch.contiguous_format)


def _samples() -> Iterator[tuple[Any, ...]]:
    yield torch.tensor(3), torch.tensor(4)
    yield torch.tensor([3, 5]), torch.tensor([0, -1])
    yield torch.arange(6).view(2, 3).t(), torch.ones(2, 3, dtype=torch.int64).t()
    yield torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)


counted: OpOverload = register_op(
    "fp8compile::counted",
    _kernel,
    fake=lambda counter, more: counter.new_empty(counter.shape),
    backward=None,
    decompose=None,  # stays an op, because it checks at run time whether a backward is running
    sharding=None,
    samples=_samples,
)
