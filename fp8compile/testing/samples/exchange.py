"""Sample arguments of the ops that send rows, and of two that mark results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.ops.exchange.exchange_rows import BACK, THERE
from fp8compile.quantizers import GEMMS, CurrentScaling, Recipe
from fp8compile.testing.samples import inputs

__all__ = ["SAMPLES"]

OUTPUT, GRAD_INPUT = GEMMS[:2]


def _dispatch() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of `dispatch` for one rank; more ranks need processes (tests/parallel)."""
    rows = torch.randn(12, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = torch.tensor([[5, 0, 7]])
    for index, recipe in enumerate(inputs.recipes()):
        yield rows, counts, counts, torch.tensor([[12], [12]]), None, (OUTPUT, GRAD_INPUT)[index % 2].a, recipe, ""
        yield rows, counts, counts, None, 16, (GRAD_INPUT, OUTPUT)[index % 2].a, recipe, ""
    none = torch.zeros_like(counts)
    yield rows[:0], none, none, none[:, :2].t(), None, OUTPUT.a, recipe, ""
    yield rows.float().t()[:8].t(), counts[:, :1], counts[:, :1], torch.tensor([[5], [5]]), 5, OUTPUT.a, Recipe(), ""


def _combine() -> Iterator[tuple[Any, ...]]:
    for rows, sent, received, sizes, length, _, recipe, group in _dispatch():
        grouped = rows[: int(sent.sum())] if sizes is not None else rows.repeat(2, 1)[:length]
        yield grouped, sent, received, sizes, rows.shape[0], recipe, group


def _exchange_rows() -> Iterator[tuple[Any, ...]]:
    """Yield sample arguments of `exchange_rows` for one rank; tests/parallel has more ranks."""
    rows = torch.arange(24, dtype=torch.uint8).view(6, 4)
    yield rows[::2, :3], torch.tensor([[2], [3]]), THERE, 3, ""
    for count in (6, 4, 0):
        sizes = torch.tensor([[count], [count]])
        yield rows, sizes, THERE, None, ""
        yield rows[:count], sizes, BACK, 6, ""


def _counted() -> Iterator[tuple[Any, ...]]:
    yield torch.tensor(3), torch.tensor(4)
    yield torch.tensor([3, 5]), torch.tensor([0, -1])
    yield torch.arange(6).view(2, 3).t(), torch.ones(2, 3, dtype=torch.int64).t()
    yield torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)


def _scatter_sum() -> Iterator[tuple[Any, ...]]:
    yield torch.arange(6.0).view(2, 3), 0, Recipe()
    yield torch.arange(6.0).view(2, 3).t(), 1, Recipe()
    yield torch.empty(0, 3), 0, Recipe()


def _straight_through() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for x in (torch.randn(5, 24, generator=generator), torch.randn(6, 4, generator=generator).t(), torch.empty(0, 8)):
        yield x.round(), x, CurrentScaling()
        yield x.round(), x.bfloat16(), CurrentScaling()


SAMPLES = {
    "fp8compile::dispatch": _dispatch,
    "fp8compile::combine": _combine,
    "fp8compile::exchange_rows": _exchange_rows,
    "fp8compile::counted": _counted,
    "fp8compile::scatter_sum": _scatter_sum,
    "fp8compile::straight_through": _straight_through,
}
