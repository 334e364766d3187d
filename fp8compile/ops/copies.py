"""Ops that are a copy in eager mode, and mean something to Inductor, which lowers each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding import Split, along_every_dim

__all__ = ["register_copy"]


def _kernel(x: Tensor) -> Tensor:
    return x.clone()


def _sharding(x: Tensor) -> list[Split]:
    return along_every_dim(x.ndim, inputs=1, outputs=1)


def _samples() -> Iterator[tuple]:
    yield (torch.arange(6.0).view(2, 3),)
    yield (torch.arange(6.0).view(2, 3).t(),)
    yield (torch.empty(0, 3),)


def register_copy(name: str, lower: Callable) -> torch._ops.OpOverload:
    """An op that copies its tensor, for decompositions only; ``lower`` is what Inductor makes of it, from IR to IR."""
    op = register_op(
        name,
        _kernel,
        fake=torch.empty_like,
        backward=None,
        decompose=None,  # a lowering instead
        sharding=_sharding,
        samples=_samples,
    )
    _compat.register_lowering(op, lower)
    return op
