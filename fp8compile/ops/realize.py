"""fp8compile::realize: a value that Inductor computes once and stores, instead of once for each use.

Inductor inlines pointwise code into whatever reads it. For the multiplier of a block that means an exact (float64)
division for every element. This op stands in decompositions only; its lowering marks the value as one to store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding import Split, along_every_dim

__all__ = ["realize"]


def _kernel(x: Tensor) -> Tensor:
    return x.clone()


def _lower(x: Any) -> Any:
    x.realize()
    return x


def _sharding(x: Tensor) -> list[Split]:
    return along_every_dim(x.ndim, inputs=1, outputs=1)


def _samples() -> Iterator[tuple]:
    yield (torch.arange(6.0).view(2, 3),)
    yield (torch.arange(6.0).view(2, 3).t(),)
    yield (torch.empty(0, 3),)


realize = register_op(
    "fp8compile::realize",
    _kernel,
    fake=torch.empty_like,
    backward=None,
    decompose=None,  # a lowering instead
    sharding=_sharding,
    samples=_samples,
)
_compat.register_lowering(realize, _lower)
