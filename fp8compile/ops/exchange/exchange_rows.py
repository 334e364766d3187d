"""fp8compile::exchange_rows: send rows to the other ranks of a group, and return the rows received.

The numbers of rows are on the host, which needs them to send messages. In a graph, the number of received rows is an
unbacked symbol on which no guard depends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.collectives import all_to_all
from fp8compile.ops.registry import register_op

__all__ = ["BACK", "THERE", "exchange_rows"]

THERE, BACK = False, True  # values of `back`: rows go to experts, or return from them


def _kernel(rows: Tensor, sizes: Tensor, back: bool, length: int | None, group: str) -> Tensor:
    sent, received = reversed(sizes.tolist()) if back else sizes.tolist()
    found = rows[: sum(sent)]
    if len(sent) > 1:
        found = all_to_all(found, received, sent, group)
    if length is None or length == found.shape[0]:
        return found if len(sent) > 1 else found.clone()  # all_to_all has returned a new tensor
    return torch.cat((found, found.new_zeros((length - found.shape[0], *found.shape[1:]))))


def _fake(rows: Tensor, sizes: Tensor, back: bool, length: int | None, group: str) -> Tensor:
    received: Any = _compat.new_dynamic_size() if length is None else length
    return rows.new_empty((received, *rows.shape[1:]))


exchange_rows: OpOverload = register_op(
    "fp8compile::exchange_rows",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,
    portable="the number of rows sent between ranks depends on the data. Export a model whose experts are all on one "
    "rank",
    sharding=None,  # takes rows of this rank alone, never DTensors
)
"""Send rows to all ranks, and return the rows that all ranks sent to this one, in the order of ranks.

Args:
    rows: (rows, ...), sorted by the rank to which they go. Rows beyond the sum of sent sizes are not sent.
    sizes: (2, R), int64, on the host: number of rows sent to each rank, and number received from each rank.
    back: Whether rows return: ``sizes[1]`` then has the numbers of sent rows, ``sizes[0]`` of received rows.
    length: Number of rows of the result, with zeros after the rows that arrived. None: as many as arrive.
    group: The name of the group.
"""
