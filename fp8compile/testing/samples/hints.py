"""Sample arguments of the ops that are hints to Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops.inductor_hints import COPY, LAYOUT, ONCE

__all__ = ["SAMPLES"]


def _tensors() -> tuple[Tensor, ...]:
    return torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t(), torch.empty(0, 3)


def _after() -> Iterator[tuple[Any, ...]]:
    yield from product(_tensors(), _tensors())


def _stored() -> Iterator[tuple[Any, ...]]:
    yield from product(_tensors(), (ONCE, COPY, LAYOUT))


SAMPLES = {"fp8compile::after": _after, "fp8compile::stored": _stored}
