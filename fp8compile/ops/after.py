"""fp8compile::after: a tensor as it is, that counts as made after another one, which so becomes a part of the forward.

Compilers leave to the backward what only the backward reads, and make it there from what the forward has kept; what is
marked as to be saved they save only where the forward needs it (PyTorch 2.11 to 2.15). Where the forward has the
values at hand and the backward would read a tensor for them once more, an operand of the forward is made to wait. This
op stands in decompositions only; Inductor lowers it to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding import Split, along_every_dim

__all__ = ["after"]


def _kernel(x: Tensor, other: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(x)


def _sharding(x: Tensor, other: Tensor) -> list[Split]:
    return along_every_dim(x.ndim, inputs=1, outputs=1, others=1)


def _samples() -> Iterator[tuple]:
    yield torch.arange(6.0).view(2, 3), torch.ones(4)
    yield torch.arange(6.0).view(2, 3).t(), torch.ones(())
    yield torch.empty(0, 3), torch.empty(0, dtype=torch.uint8)


def _lower(x: Any, other: Any) -> Any:
    return x


after = register_op(
    "fp8compile::after",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,  # a lowering instead
    sharding=_sharding,
    samples=_samples,
)
_compat.register_lowering(after, _lower)
